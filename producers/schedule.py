"""When a batch may run: durations, moments and daily windows as people write them. Pure: callers give the time.

Times are Unix seconds. A moment or a window that names no time zone is in UTC, on every machine alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from datetime import time as clock_time

from common.errors import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)
_DURATION = re.compile(rf"(?:{_PART.pattern})+", re.ASCII)
_WINDOW = re.compile(r"(\d{1,2}):(\d\d)\s*-\s*(\d{1,2}):(\d\d)(?:\s+(\S+))?", re.ASCII)
#: Longest duration, and farthest moment, that is meant: beyond it, it is a slip.
_MOST_S = 3660 * 86400.0
#: Unix seconds within which every zone's calendar, and the days beside a day, can be told (years 68 to 9892).
_CALENDAR = (-6e10, 2.5e11)


def duration(text: str) -> float:
    """Seconds of `90s`, `30m`, `24h`, `7d`, `1h30m`; `UsageError` for anything else, and for none at all."""
    given = text.strip().lower()
    if not _DURATION.fullmatch(given):
        raise UsageError(f"'{text}' is not a duration; write 90s, 30m, 24h, 7d or 1h30m")
    parts = _PART.findall(given)
    sizes = [_SECONDS[unit] for _, unit in parts]
    if sizes != sorted(set(sizes), reverse=True):
        raise UsageError(f"'{text}' is not a duration: name each unit once, the largest first, as in 1h30m")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not 0 < seconds <= _MOST_S:
        raise UsageError(f"'{text}' is not a duration between 1 second and 10 years")
    return seconds


def moment(text: str, now: float) -> float:
    """The Unix time that `text` means: an ISO date and time, or a duration from `now` on; at most 10 years ahead."""
    given = text.strip()
    if _DURATION.fullmatch(given.lower()):
        return now + duration(given)
    stamp, _, zone = given.partition(" ")
    # `2026-12-01 22:00 Europe/Berlin`: the space before the time is ISO's `T`.
    if zone and zone[0].isdigit():
        time_of_day, _, zone = zone.partition(" ")
        stamp = f"{stamp}T{time_of_day}"
    try:
        when = datetime.fromisoformat(stamp)
        if when.tzinfo is not None and zone:
            raise ValueError
        at = when.replace(tzinfo=when.tzinfo or zone_of(zone.strip() or "UTC")).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"'{text}' is neither a time (2026-12-01T22:00+01:00, UTC where none is said) nor a duration from now (2h)"
        ) from None
    if at > now + _MOST_S:
        raise UsageError(f"'{text}' is more than 10 years ahead")
    return at


def zone_of(name: str) -> tzinfo:
    """The time zone of that name; `UsageError` when there is none here."""
    if name.upper() in ("UTC", "Z"):
        return UTC
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise UsageError(f"'{name}' is not a time zone; write one as Europe/Berlin or UTC") from None


@dataclass(frozen=True, slots=True)
class RunWindow:
    """A stretch of every day, by the clock on the wall of `zone`; from `start` up to `end`, over midnight if need be.

    Where the clock is put forward, what does not exist that day is left out; where it is put back, what comes twice
    counts twice.
    """

    start: clock_time
    end: clock_time
    zone: tzinfo
    #: The zone as it was named, for people.
    zone_name: str = "UTC"

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M} {self.zone_name}"

    def contains(self, now: float) -> bool:
        """True inside it, and where no calendar reaches: nobody can say."""
        if not _CALENDAR[0] <= now <= _CALENDAR[1]:
            return True
        at = datetime.fromtimestamp(now, self.zone).time()
        if self.start < self.end:
            return self.start <= at < self.end
        return at >= self.start or at < self.end

    def opens(self, now: float) -> float:
        """When it is next open, from `now` on; `now` itself inside it."""
        if self.contains(now):
            return now
        today = datetime.fromtimestamp(now, self.zone).date()
        # All of them: where the clock is put back early on a day is also found from the day before, and comes after
        # that day's own beginning.
        edges = [e for ahead in range(-1, 9) for e in self._openings(today + timedelta(days=ahead)) if e >= now]
        # A zone without such an hour for a week does not exist.
        return min(filter(self.contains, edges), default=now + 86400.0)

    def _openings(self, day: date) -> list[float]:
        """When it may begin on a day: at its start, or where the clock jumps into it."""
        found = {datetime.combine(day, self.start, self.zone).replace(fold=fold).timestamp() for fold in (0, 1)}
        low = datetime.combine(day, clock_time(), self.zone).timestamp()
        high = low + 30 * 3600
        before = self._offset(low)
        if before != self._offset(high):
            while high - low > 1:
                middle = (low + high) // 2
                if self._offset(middle) == before:
                    low = middle
                else:
                    high = middle
            found.add(high)
        return sorted(found)

    def _offset(self, at: float) -> timedelta | None:
        return datetime.fromtimestamp(at, self.zone).utcoffset()


def run_window(text: str) -> RunWindow:
    """The window that `22:00-06:00` or `22:00-06:00 Europe/Berlin` means."""
    found = _WINDOW.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"'{text}' is not a daily window; write 22:00-06:00 or 22:00-06:00 Europe/Berlin")
    hour, minute, end_hour, end_minute, zone = found.groups()
    start = _time_of_day(text, int(hour), int(minute))
    end = _time_of_day(text, int(end_hour), int(end_minute))
    if start == end:
        raise UsageError(f"'{text}' begins when it ends; leave it out to run all day")
    return RunWindow(start, end, zone_of(zone or "UTC"), zone or "UTC")


def _time_of_day(text: str, hour: int, minute: int) -> clock_time:
    if (hour, minute) == (24, 0):
        hour = 0
    if hour > 23 or minute > 59:
        raise UsageError(f"'{text}': {hour}:{minute:02} is no time of day")
    return clock_time(hour, minute)


def opens(now: float, not_before: float | None, window: RunWindow | None) -> float:
    """From when on requests may be sent, `now` or later. Total: a stored batch may hold any number."""
    at = max(now, not_before or 0.0)
    return at if window is None else window.opens(at)


def waits(not_before: float | None, run_between: str | None, now: float) -> bool:
    """True while a batch's hours, as `batch.json` has them, have not come; those that cannot be read here have."""
    try:
        return opens(now, not_before, None if run_between is None else run_window(run_between)) > now
    except UsageError:
        return False
