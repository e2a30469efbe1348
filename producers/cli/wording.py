"""How a batch is put into words: statuses, reasons, durations, rates. Pure but for the clock of what is ahead."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime

from common.errors import UsageError
from producers.batch_view import BatchView
from producers.following import Pace, generated
from producers.schedule import run_window

#: What to say, and do, when a batch does not move.
_REASONS = {
    "no_workers": "waiting: no worker serves {model}; start one: workers start --model {model}",
    "no_coordinator": "waiting: no coordinator runs; start one: producers coordinate",
    "loading_model": "loading model {model}",
    "workers_sick": "workers of {model} fail at their requests and take no more",
    "starting_coordinator": "starting the coordinator",
    "starting_worker": "starting a worker of {model}",
    "waiting_for_devices": "waiting: another model has the GPUs",
    "disk_full": "waiting: the disk of the store or its log is full (32 MiB stay in reserve)",
    "broker_unreachable": "waiting: the broker does not answer the coordinator",
    "broker_memory": "waiting: the broker is nearly full",
    "store_unreachable": "waiting: the store does not answer the coordinator",
    "state_unreachable": "the Redis of the live state does not answer the coordinator",
    "paused": "paused: nothing is sent; let it go on: producers resume-dispatch {id}",
    "scheduled": "waiting until {opens}",
}
_NO_FLEET = "waiting: the embedded fleet does not run; bring it back: producers resume"


def reason(seen: BatchView, *, embedded: bool = False) -> str | None:
    """Why a batch does not move, or None. `embedded`: no broker is configured."""
    if seen.reason is None:
        return None
    why = seen.reason
    if why == "no_coordinator" and embedded:
        if not seen.paused:
            return _NO_FLEET
        why = "paused"  # Nobody need be there for it.
    known = _REASONS.get(why)
    if known is not None:
        opens = "its hours" if seen.opens_at is None else when(seen.opens_at, time.time(), seen.run_between)
        return known.format(model=seen.model, id=seen.id, opens=opens)
    return why.replace("_", " ") if why.isidentifier() else why


def cause(reason: str) -> str:
    """A reason that several batches share, in a few words."""
    said = _REASONS.get(reason, "").partition(";")[0]
    return said if said and "{" not in said else reason.replace("_", " ")


def status(seen: BatchView) -> str:
    """`in_progress` as `in progress`."""
    return seen.status.replace("_", " ")


def number(count: int, noun: str) -> str:
    """`1 request`, `2,000 requests`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def percent(seen: BatchView) -> int:
    """Whole percent that are done; 100 only when all are."""
    total = seen.request_counts.total
    return 100 * seen.answered // total if total else 100


def compact(number: int) -> str:
    """A count in at most five characters: `999`, `12.8k`, `1.0M`."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number // size}{unit}" if number >= 100 * size else f"{number // (size // 10) / 10:.1f}{unit}"
    return str(number)


def duration(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`; whole seconds, rounded up so that it never says 0:00 before the end."""
    whole = max(0, int(seconds) + (seconds > int(seconds)))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def took(seconds: float) -> str:
    """What something took in the end: `6.3 s`, `12:34`."""
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def ago(seconds: float) -> str:
    """`12 s`, `5 min`, `3 h`, `9 d`."""
    for span, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * span:
            return f"{int(seconds // span)} {unit}"
    return f"{max(0, int(seconds))} s"


def ahead(seconds: float) -> str:
    """`in 12 s`, `in 5 min`, `in 3 h`; `now` for what is not ahead."""
    return f"in {ago(seconds)}" if seconds > 0 else "now"


def when(at: float, now: float, window: str | None = None) -> str:
    """A time of day, with the date unless it comes within a day: `22:00 CET`, `2026-12-01 22:00 UTC`.

    In the time zone of a daily window, where there is one, else in this machine's.
    """
    zone, name = None, None
    if window is not None:
        with contextlib.suppress(UsageError):
            parsed = run_window(window)
            zone, name = parsed.zone, parsed.zone_name
    try:
        moment = datetime.fromtimestamp(at, zone) if zone is not None else datetime.fromtimestamp(at).astimezone()
    except (ValueError, OverflowError, OSError):
        # A stored batch may hold any number.
        return "a time beyond the calendar"
    text = f"{moment:%H:%M}" if 0 <= at - now < 20 * 3600 else f"{moment:%Y-%m-%d %H:%M}"
    return f"{text} {name or moment.tzname() or ''}".rstrip()


def standing(seen: BatchView, now: float) -> list[str]:
    """What sets a batch apart from an ordinary one: its priority, its deadline, its tenant."""
    said = []
    if seen.priority != "normal":
        said.append(f"priority {seen.priority}")
    if seen.expires_at is not None and not seen.final:
        said.append(f"due {ahead(seen.expires_at - now)}")
    if seen.tenant != "default":
        said.append(f"tenant {seen.tenant}")
    return said


def plain(text: str) -> str:
    """Text without characters that would steer a terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def rate(per_s: float, unit: str) -> str:
    """`0.4 req/s`, `12.3 req/s`, `1,234 req/s`."""
    return f"{per_s:,.0f} {unit}" if per_s >= 100 else f"{per_s:.1f} {unit}"


def facts(seen: BatchView, pace: Pace) -> list[str]:
    """The facts beside the bar, the most telling first."""
    said: list[str] = []
    if seen.request_counts.failed:
        said.append(f"{seen.request_counts.failed:,} failed")
    # Of one that has ended, its speed as a whole is told.
    if pace.requests_per_s > 0 and not seen.final:
        said.append(rate(pace.requests_per_s, "req/s"))
    if pace.tokens_per_s > 0 and not seen.final:
        said.append(rate(pace.tokens_per_s, "tok/s"))
    if seen.usage.cache_hits:
        said.append(f"{seen.usage.cache_hits:,} cache hits")
    if seen.usage.shared:
        said.append(f"{seen.usage.shared:,} shared")
    if pace.left_s is not None and not seen.final:
        said.append(f"{duration(pace.left_s)} left")
    return [*said, *standing(seen, time.time())]


def line(seen: BatchView, pace: Pace, *, embedded: bool = False) -> str:
    """The whole state in one line, for where there is no terminal."""
    counts = seen.request_counts
    said = [f"{seen.id} {status(seen)}", f"{seen.answered:,}/{counts.total:,} done", *facts(seen, pace)]
    why = reason(seen, embedded=embedded)
    return ", ".join([*said, *([why] if why else [])])


def ending(seen: BatchView) -> str:
    """How a batch ended, or stands, in one line."""
    counts = seen.request_counts
    text = f"{seen.id} {status(seen)}: {counts.completed:,} answered, {counts.failed:,} failed"
    if seen.started_at is not None and seen.finished_at is not None:
        span = seen.finished_at - seen.started_at
        text += f" in {took(span)}"
    why = reason(seen)
    return f"{text}; {why}" if why else text


def speed(seen: BatchView) -> str | None:
    """How fast a batch was from its first dispatch to its last answer."""
    if seen.started_at is None or seen.finished_at is None or seen.finished_at <= seen.started_at:
        return None
    span = seen.finished_at - seen.started_at
    # Of a batch that was cut, the failed are mostly those that never ran.
    done = seen.answered if seen.status == "completed" else seen.request_counts.completed
    return f"{rate(done / span, 'requests/s')}, {rate(generated(seen) / span, 'tokens/s')}"
