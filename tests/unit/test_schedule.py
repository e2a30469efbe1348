"""Durations, moments and daily windows as people write them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UsageError
from producers.schedule import duration, moment, opens, run_window

BERLIN = "Europe/Berlin"
#: When clocks change in the zones below, UTC.
CHANGES = ("2026-03-29T01:00", "2026-10-25T01:00", "2026-03-08T07:00", "2026-11-01T06:00", "2026-04-04T15:00")


def _at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("24h", 86400), ("7d", 604800), ("1h30m", 5400), ("1.5h", 5400), (" 2W ", 1209600)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "1h 30m", "0s", "1y", "99999d", "1e3s", "٣h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a duration"):
        duration(text)


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("2026-07-01T22:00", "2026-07-01T22:00"),
        ("2026-07-01 22:00", "2026-07-01T22:00"),
        ("2026-07-01T22:00Z", "2026-07-01T22:00"),
        ("2026-07-01T22:00+02:00", "2026-07-01T20:00"),
        ("2026-07-01 22:00 Europe/Berlin", "2026-07-01T20:00"),
        ("2026-12-01T22:00 Europe/Berlin", "2026-12-01T21:00"),
        ("2h", "2026-01-01T02:00"),
    ],
)
def test_moments(text: str, when: str) -> None:
    assert moment(text, _at("2026-01-01T00:00")) == _at(when)


@pytest.mark.parametrize("text", ["5s5s", "1m1h", "1h1d", "1h30m30m"])
def test_units_of_a_duration_descend(text: str) -> None:
    with pytest.raises(UsageError, match="the largest first"):
        duration(text)


@pytest.mark.parametrize(
    "text", ["9999-12-31T23:30-14:00", "9999-12-25T12:00", "2099-01-01T00:00", "9999-12-31 23:59 UTC"]
)
def test_a_moment_is_at_most_ten_years_ahead(text: str) -> None:
    with pytest.raises(UsageError, match="10 years"):
        moment(text, _at("2026-01-01T00:00"))


@given(
    now=st.floats(allow_nan=True, allow_infinity=True),
    not_before=st.none() | st.floats(allow_nan=True, allow_infinity=True),
    zone=st.sampled_from(["UTC", "Asia/Tokyo", "Pacific/Kiritimati", "America/Los_Angeles"]),
)
@settings(deadline=None)
def test_opens_takes_any_number(now: float, not_before: float | None, zone: str) -> None:
    for edge in (now, 2.5e11, 253402349400.0, 253401739200.0, -6e10, -62135596800.0):
        opens(edge, not_before, run_window(f"22:00-06:00 {zone}"))
        run_window(f"22:00-06:00 {zone}").contains(edge)


@pytest.mark.parametrize("text", ["", "tomorrow", "22:00", "2026-13-01T00:00", "2026-07-01T22:00Z Europe/Berlin"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither a time"):
        moment(text, 0.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("22-6", "not a daily window"),
        ("22:00", "not a daily window"),
        ("22:00-22:00", "leave it out"),
        ("25:00-06:00", "no time of day"),
        ("22:60-06:00", "no time of day"),
        ("22:00-06:00 Middle/Earth", "not a time zone"),
        ("22:00-06:00 ../../etc/passwd", "not a time zone"),
    ],
)
def test_what_is_no_window_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        run_window(text)


def test_a_window_over_midnight_in_its_zone() -> None:
    night = run_window(f"22:00-6:00 {BERLIN}")
    assert str(night) == f"22:00-06:00 {BERLIN}"
    assert [night.contains(_at(f"2026-07-01T{t}")) for t in ("19:59", "20:00", "03:59", "04:00")] == [0, 1, 1, 0]
    assert [night.contains(_at(f"2026-12-01T{t}")) for t in ("20:59", "21:00", "04:59", "05:00")] == [0, 1, 1, 0]
    assert night.opens(_at("2026-07-01T12:00")) == _at("2026-07-01T20:00")
    assert night.opens(_at("2026-07-01T23:00")) == _at("2026-07-01T23:00")
    assert run_window("18:00-24:00").contains(_at("2026-07-01T23:59"))


@pytest.mark.parametrize(
    ("window", "now", "opens"),
    [
        # 02:00 to 03:00 does not exist on that morning: it opens where the clock lands, or not before the next day.
        ("02:30-06:00", "2026-03-29T00:00", "2026-03-29T01:00"),
        ("02:00-03:00", "2026-03-29T00:30", "2026-03-30T00:00"),
        # 02:00 to 03:00 comes twice.
        ("02:30-02:45", "2026-10-25T00:00", "2026-10-25T00:30"),
        ("02:30-02:45", "2026-10-25T01:00", "2026-10-25T01:30"),
        # Back into the window, after its own beginning that day: the beginning is the sooner one.
        ("00:00-02:01", "2026-10-24T00:01", "2026-10-24T22:00"),
    ],
)
def test_the_days_on_which_clocks_change(window: str, now: str, opens: str) -> None:
    assert run_window(f"{window} {BERLIN}").opens(_at(now)) == _at(opens)


_MINUTE = st.integers(0, 1439)


@settings(max_examples=60, deadline=None)
@given(
    start=_MINUTE,
    end=_MINUTE,
    zone=st.sampled_from(["UTC", BERLIN, "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"]),
    # Around the changes of the clock as often as on ordinary days.
    now=st.one_of(
        st.integers(int(_at("2026-01-01T00:00")) // 60, int(_at("2026-12-31T00:00")) // 60),
        *(
            st.integers(int(_at(day)) // 60 - 1440, int(_at(day)) // 60 + 1440)
            for day in (
                "2026-03-29T01:00",
                "2026-10-25T01:00",
                "2026-03-08T07:00",
                "2026-11-01T06:00",
                "2026-04-04T15:00",
            )
        ),
    ),
)
def test_it_opens_at_the_first_minute_that_it_contains(start: int, end: int, zone: str, now: int) -> None:
    if start == end:
        return
    window = run_window(f"{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02} {zone}")
    opens = window.opens(now * 60.0)
    minute = now
    while not window.contains(minute * 60.0):
        minute += 1
    assert opens == minute * 60.0
