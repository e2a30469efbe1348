"""Words for people: numbers that read well, text that cannot steer a terminal, tables that fit 80 columns."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from common.messages import CacheFacts, Usage
from common.store import LocalStore
from producers.batch_view import BatchView, view
from producers.cli import wording
from producers.cli.bar import frame
from producers.cli.cards import card, listing
from producers.following import Pace
from tests.support import stored


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (0.2, "0:01"), (59.5, "1:00"), (754, "12:34"), (3723, "1:02:03"), (-1, "0:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert wording.duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (6.25, "6.2 s"), (61, "1:01"), (3723, "1:02:03")])
def test_a_time_taken_reads_the_same_wherever_it_is_told(seconds: float, text: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    of = stored.batch(store)
    status = stored.status(store, of, "completed", started_at=stored.NOW, finished_at=stored.NOW + seconds)
    seen = view(of, status, None)
    assert wording.ending(seen).endswith(f" in {text}")
    assert any(line.split()[:1] == ["took"] and text in line for line in _lines(card(seen, stored.NOW)))


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "3 s"), (119, "119 s"), (300, "5 min"), (9000, "2 h"), (9e5, "10 d")]
)
def test_ages(seconds: float, text: str) -> None:
    assert wording.ago(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0k"),
        (12_849, "12.8k"),
        (999_999, "999k"),
        (1_000_000, "1.0M"),
        (10**10, "10.0G"),
    ],
)
def test_compact_counts(number: int, text: str) -> None:
    assert wording.compact(number) == text


@given(st.integers(0, 10**12 - 1))
def test_compact_counts_never_take_more_than_five_columns(number: int) -> None:
    assert len(wording.compact(number)) <= 5


@given(st.text())
def test_plain_text_steers_no_terminal(text: str) -> None:
    plain = wording.plain(text)
    assert len(plain) == len(text)
    assert plain.isprintable()


def _seen(store: LocalStore, **fields: object) -> BatchView:
    """The widest batch there can be."""
    of = stored.batch(store, requests=1_000_000, name="[red]a\x1b[31m name" * 9, metadata={"k": "[b]v\x07"})
    status = stored.status(
        store, of, "in_progress", 987_654, 12_345, started_at=stored.NOW - 100, usage=Usage(10**9, 10**9, 10**8, 10**5)
    )
    return view(of, status, "no_coordinator")


def _lines(what: RenderableType, width: int = 80) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=False).print(what)
    return file.getvalue().splitlines()


def test_everything_fits_eighty_columns_and_keeps_the_id(tmp_path: Path) -> None:
    seen = _seen(LocalStore(tmp_path))
    pace = Pace(12_345.6, 1_234_567.8, 3599)
    for what in (listing([seen] * 3, stored.NOW + 86400 * 999, 80), card(seen, stored.NOW), frame(seen, pace)):
        lines = _lines(what)
        assert any(seen.id in line for line in lines)
        assert all(len(line) <= 80 for line in lines)
        assert not any(c in line for line in lines for c in "\x1b\x07")
    head = _lines(listing([seen], stored.NOW, 80))[0]
    assert head.split() == ["id", "status", "done", "of", "failed", "age", "name"]


def test_markup_in_names_is_shown_not_obeyed(tmp_path: Path) -> None:
    assert any("[red]a" in line for line in _lines(card(_seen(LocalStore(tmp_path)), stored.NOW)))


@pytest.mark.parametrize(
    ("usage", "said"),
    [
        # A worker's figures count 200 misses here: those that shared an answer were looked up as well.
        (Usage(cache_hits=0, cache_misses=10, shared=190), "0 of 200 asked for (0%)"),
        (Usage(cache_hits=50, cache_misses=100, shared=50), "50 of 200 asked for (25%)"),
        (Usage(shared=190), None),
    ],
)
def test_what_the_cache_was_asked_for_is_what_its_own_figures_count(
    tmp_path: Path, usage: Usage, said: str | None
) -> None:
    store = LocalStore(tmp_path)
    of = stored.batch(store, requests=200)
    text = "\n".join(
        _lines(card(view(of, stored.status(store, of, "completed", 200, usage=usage), None), stored.NOW), 120)
    )
    assert "190 answered by equal" in text or usage.shared != 190
    assert (said in text) if said is not None else ("asked for" not in text)


def test_how_full_the_cache_is_is_told_as_the_servers(tmp_path: Path) -> None:
    """Not as this batch's: what was pushed out is everybody's."""
    store = LocalStore(tmp_path)
    of = stored.batch(store, cache="on")
    facts = CacheFacts(entries=12_408, bytes=33_134_592, capacity_bytes=1 << 30, evicted=1_234_567)
    lines = _lines(card(view(of, stored.status(store, of, "completed", 10, cache=facts), None), stored.NOW))
    assert "cache server  12,408 entries, 31.6 MB of 1,024.0 MB, 1,234,567 pushed out in all" in lines


def test_a_frame_tells_all_that_a_person_waits_for(tmp_path: Path) -> None:
    text = "\n".join(_lines(frame(_seen(LocalStore(tmp_path)), Pace(12.3, 250, 12)), 120))
    for part in (
        "999,999/1,000,000",
        "99%",
        "12,345 failed",
        "12.3 req/s",
        "250 tok/s",
        "100,000 cache hits",
        "0:12 left",
    ):
        assert part in text
    assert "no coordinator runs" in text


def test_of_a_batch_that_has_ended_no_momentary_rate_is_told(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    of = stored.batch(store)
    for status, told in (("in_progress", True), ("completed", False)):
        seen = view(of, stored.status(store, of, status, 10), None)
        assert ("12.3 req/s" in wording.line(seen, Pace(12.3, 250, 12))) is told


def test_an_unknown_reason_is_shown_as_it_is(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    of = stored.batch(store)
    seen = view(of, stored.status(store, of, "in_progress", reason="moon_phase"), None)
    assert wording.reason(seen) == "moon phase"
