"""Batches that are cancelled, expire or are paused: while they wait, while they run, as they end, and afterwards."""

from __future__ import annotations

import time

from tests.fault.fleet import READY, Asked, Fleet, injected
from tests.fault.table import case
from tests.support.ports import wait_until


def workers_at_last(fleet: Fleet) -> None:
    for worker in [fleet.start_worker() for _ in range(2)]:
        worker.wait_line(READY, 90)


def answered_share(fleet: Fleet, asked: Asked) -> float:
    counts = fleet.status(asked).request_counts
    return (counts.completed + counts.failed) / len(asked.custom_ids)


def wait_share(fleet: Fleet, asked: Asked, share: float) -> None:
    wait_until(lambda: answered_share(fleet, asked) >= share, 90, f"{share:.0%} of {asked.id} are logged", 0.02)


@case("23a", "cancel a batch: queued, running, as it ends, ended", quick="redis")
def test_cancelled_in_each_phase(fleet: Fleet) -> None:
    fleet.start(workers=0)
    queued, started = fleet.submit(300), fleet.submit(4000)
    with fleet.fault():
        fleet.producers("cancel", queued.id)
        queued.cut("cancelled")
        workers_at_last(fleet)
        wait_share(fleet, started, 0.2)
        fleet.producers("cancel", started.id)
        started.cut("cancelled")
        ended = fleet.submit(200)
        assert fleet.wait_ended(ended) == "completed"
        assert not fleet.producers("cancel", ended.id)["asked"]
        ending = fleet.submit(500)
        # All but the last are logged: the cancel races with the end, and either may win.
        wait_share(fleet, ending, 0.9)
        fleet.producers("cancel", ending.id)
        ending.cut("completed", "cancelled")
    fleet.finish()
    assert fleet.status(queued).request_counts.completed == 0
    assert 800 <= fleet.status(started).request_counts.completed < 4000


@case("23b", "a batch's deadline passes: queued, running, as it ends", quick="rabbitmq")
def test_expired_in_each_phase(fleet: Fleet) -> None:
    fleet.start(workers=0)
    with fleet.fault():
        queued = fleet.submit(300, "--completion-window", "1s")
        queued.cut("expired")
        assert fleet.wait_ended(queued) == "expired"
        workers_at_last(fleet)
        started = fleet.submit(5000, "--completion-window", "8s")
        started.cut("expired")
        ending = fleet.submit(400, "--completion-window", "9s")
        ending.cut("expired", "completed")
        whole = fleet.submit(400, "--completion-window", "1h")
    fleet.finish()
    assert fleet.status(queued).request_counts.completed == 0
    assert 0 < fleet.status(started).request_counts.completed < 5000
    assert fleet.status(whole).request_counts.completed == 400


@case("23c", "pause a batch: queued, running, with its coordinator killed meanwhile", quick="redis")
def test_paused_in_each_phase(fleet: Fleet) -> None:
    queued, cancelled = fleet.submit(300), fleet.submit(300)
    with fleet.fault():
        for asked in (queued, cancelled):
            fleet.producers("pause", asked.id)
        fleet.start(workers=0)
        started = fleet.submit(4000)
        workers_at_last(fleet)
        wait_share(fleet, started, 0.2)
        fleet.producers("pause", started.id)
        wait_until(lambda: fleet.status(started).in_flight == 0, 30, "what is in engines comes in")
        fleet.coordinators[0].kill()
        fleet.start_coordinator().wait_line(r"\bleads\b", 60)
        before = fleet.answered()
        time.sleep(2)
        assert fleet.answered() == before, "something was sent while all batches were paused"
        fleet.producers("cancel", cancelled.id)
        cancelled.cut("cancelled")
        assert fleet.wait_ended(cancelled) == "cancelled"
        for asked in (queued, started):
            fleet.producers("resume-dispatch", asked.id)
    fleet.finish()


@case("21c", "clock of one worker 10 minutes ahead, and batches with deadlines", quick="redis")
def test_clock_ahead_with_deadlines(fleet: Fleet) -> None:
    """A worker whose clock says that all of it is late gives back what it has not answered."""
    fleet.start(workers=1)
    fleet.start_worker(**injected("clock_ahead", fleet.folder)).wait_line(READY, 60)
    with fleet.fault():
        fleet.submit(1000, "--completion-window", "5m")
        late = fleet.submit(3000, "--completion-window", "6s")
        late.cut("expired")
    fleet.finish()
