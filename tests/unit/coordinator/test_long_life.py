"""A coordinator that runs for months: what it remembers does not grow with what it has done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import Unreachable
from common.store import LocalStore
from producers.coordinator import losses
from producers.coordinator.book import Book
from producers.coordinator.control import Control
from producers.coordinator.core import Core
from producers.coordinator.fair_queue import FairQueue
from producers.coordinator.finalizer import Finalizer
from producers.coordinator.ledger import Ledger
from producers.coordinator.status_files import StatusFiles
from tests.support import stored


class Leader:
    """Leads. `away`: how often the store does not answer it first."""

    def __init__(self, away: int = 0) -> None:
        self.away = away

    def check(self) -> None:
        if self.away:
            self.away -= 1
            raise Unreachable("the store is away")

    beat = check


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(Book(), Ledger(tmp_path / "wal", 1), 0, 1)


def test_a_store_that_is_away_as_batches_end_costs_none_its_end(core: Core, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    progresses = [core.book.open(stored.batch(store)) for _ in range(3)]
    finalizer = Finalizer(core, store, Leader(away=1), StatusFiles(store))  # type: ignore[arg-type]
    for progress in progresses:
        finalizer.submit(progress)
    finalizer._end(progresses)
    assert {progress.trouble for progress in progresses} == {"store_unreachable"}
    # Each by itself, and not before a while has passed.
    again = [batch_id for _ in progresses for batch_id in finalizer._small.take(256, 0.0)]
    assert sorted(again) == sorted(progress.id for progress in progresses)
    later = [batch_id for _ in progresses for batch_id in finalizer._small.take(256, 30.0)]
    assert sorted(later) == sorted(progress.id for progress in progresses)


def test_nothing_is_remembered_of_batches_that_are_gone(core: Core, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    open_ = core.book.open(stored.batch(store))
    some: Any = SimpleNamespace()
    control = Control(core, store, Leader(), some, StatusFiles(store), 6.0)  # type: ignore[arg-type]
    for n in range(5000):
        control._said[f"batch_{n}"] = (0.0, "in_progress", None)
        control._troubled[f"batch_{n}"] = 0.0
    control._said[open_.id] = (0.0, "in_progress", None)
    control._forget()
    assert list(control._said) == [open_.id]
    assert control._troubled == {}


def test_tenants_that_come_once_are_forgotten() -> None:
    queue = FairQueue()
    queue.activate("large", "always")
    for n in range(5000):
        queue.activate(f"b{n}", f"tenant-{n}")
        for name in (f"b{n}", "large"):
            queue.weigh(name, 1.0, 1.0)
            queue.charge(name, 100.0)
        queue.forget(f"b{n}")
    assert len(queue._batches) == len(queue._tenants.flows) < 1000
    assert queue.round().next() == "large"


def test_workers_that_are_gone_are_forgotten(core: Core) -> None:
    lane = core.book.lane("m@1")
    for n in range(5000):
        lane.silent.add(f"pod-{n}")
        lane.leased_order[f"infer.m.1.pod-{n}"] = n
    losses.see_workers(core.book, {"pod-4999"}, 0.0)
    assert lane.silent == {"pod-4999"}
    assert lane.leased_order == {}
