"""Following a batch: it ends with the batch, survives a store that blinks, and tells who is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import Unreachable, UsageError
from common.ids import new_batch_id
from common.messages import Usage
from common.store import LocalStore
from producers.batch import Heartbeat
from producers.batch_view import BatchView, view
from producers.cli.progress import LINE_S, SAME_S, Lines
from producers.following import LAST_POLL_S, PATIENCE_S, Meter, Pace, Pulse, follow
from tests.support import stored


class Clock:
    """A clock that only moves when somebody pauses; `events` happen at their time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.events: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()


def test_follow_ends_with_the_first_final_view(tmp_path: Path) -> None:
    store, clock = LocalStore(tmp_path), Clock()
    of = stored.batch(store)
    stored.heartbeat(store, clock.now)
    clock.events = [
        (1002, lambda: stored.status(store, of, "in_progress", 5)),
        (1009, lambda: stored.status(store, of, "completed", 10)),
        (1010, lambda: pytest.fail("followed on after the end")),
    ]
    seen = list(follow(store, of.id, clock=clock, wall=clock, pause=clock.pause))
    assert [s.status for s in seen[:1] + seen[-1:]] == ["queued", "completed"]
    assert {s.status for s in seen} == {"queued", "in_progress", "completed"}
    assert sum(s.final for s in seen) == 1


def test_follow_refuses_what_is_not_there(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(UsageError, match="no batch"):
        next(follow(store, new_batch_id()))
    with pytest.raises(UsageError, match="not a batch id"):
        next(follow(store, "../../etc/passwd"))


class Blinking(LocalStore):
    """A store that can be made to fail."""

    broken = False

    def read(self, path: str) -> bytes:
        if self.broken:
            raise OSError(116, "Stale file handle")
        return super().read(path)


def test_follow_outlives_a_store_that_blinks_and_gives_up_on_one_that_stays_away(tmp_path: Path) -> None:
    store, clock = Blinking(tmp_path), Clock()
    of = stored.batch(store)
    views = follow(store, of.id, clock=clock, wall=clock, pause=clock.pause)
    next(views)
    store.broken = True
    clock.events = [(1000 + PATIENCE_S / 2, lambda: setattr(store, "broken", False))]
    assert next(views).status == "queued"
    store.broken = True
    gone_at = clock.now
    with pytest.raises(Unreachable, match=f"Stale file handle; {of.id} goes on"):
        next(views)
    assert PATIENCE_S <= clock.now - gone_at <= PATIENCE_S + 3 * LAST_POLL_S


def test_a_pulse_trusts_change_not_the_other_machines_clock() -> None:
    pulse, skew = Pulse(), -10_000.0
    assert not pulse.feel(None, 0, 0)
    assert not pulse.feel(Heartbeat(epoch=1, host="h", pid=1, at=skew), 0, 0)  # maybe old: nothing to tell by
    assert pulse.feel(Heartbeat(epoch=1, host="h", pid=1, at=skew + 2), 2, 2)
    assert pulse.feel(Heartbeat(epoch=1, host="h", pid=1, at=skew + 2), 16, 16)
    assert not pulse.feel(Heartbeat(epoch=1, host="h", pid=1, at=skew + 2), 18, 18)
    assert pulse.feel(Heartbeat(epoch=2, host="i", pid=1, at=skew + 19), 19, 19)
    assert Pulse().feel(Heartbeat(epoch=1, host="h", pid=1, at=5), 0, 6)


def _views(tmp_path: Path, *points: tuple[int, int]) -> list[BatchView]:
    store = LocalStore(tmp_path)
    of = stored.batch(store, requests=1000)
    return [
        view(of, stored.status(store, of, "in_progress", done, usage=Usage(0, tokens, 0, 0)), None)
        for done, tokens in points
    ]


def test_the_meter_tells_rates_and_the_time_left(tmp_path: Path) -> None:
    meter = Meter()
    none, first, second, third = _views(tmp_path, (0, 0), (100, 1000), (200, 3000), (300, 5000))
    assert meter.add(none, -100) == Pace()
    # A model that loads is no part of the speed, nor are the answers that came between two looks a moment apart.
    assert meter.add(none, -0.05) == Pace()
    assert meter.add(first, 0) == Pace()
    assert meter.add(second, 10) == Pace(10.0, 200.0, 80.0)
    assert meter.add(second, 20) == Pace(5.0, 100.0, 160.0)
    # What lies more than 20 s back no longer counts.
    assert meter.add(third, 40) == Pace(100 / 30, 2000 / 30, 700 / (100 / 30))


def test_a_moment_tells_no_rate(tmp_path: Path) -> None:
    meter = Meter()
    none, first, second = _views(tmp_path, (0, 0), (1, 10), (300, 5000))
    for at, seen in ((0, none), (0.1, first), (0.7, second)):
        assert meter.add(seen, at) == Pace()
    assert meter.add(second, 1.1).requests_per_s == pytest.approx(299)


def test_lines_come_at_a_turn_and_now_and_then(tmp_path: Path) -> None:
    store, clock = LocalStore(tmp_path), Clock()
    of = stored.batch(store)
    said: list[str] = []
    lines = Lines(said.append, clock)

    def show(status: str, done: int, reason: str | None = None) -> int:
        lines.show(view(of, stored.status(store, of, status, done, reason=reason), None))
        return len(said)

    assert show("queued", 0) == 1
    assert show("queued", 0, "no_workers") == 2
    assert "workers start --model echo-test@1" in said[-1]
    assert show("in_progress", 1) == 3
    clock.now += LINE_S - 1
    assert show("in_progress", 2) == 3
    clock.now += 1
    assert show("in_progress", 3) == 4
    assert f"{of.id} in progress, 3/10 done" in said[-1]
    clock.now += SAME_S - 1
    assert show("in_progress", 3) == 4
    clock.now += 1
    assert show("in_progress", 3) == 5
