"""Requests that share a long prefix stay with one worker, and what waits for a slow one is answered by another."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from common import metrics
from common.settings import Settings
from common.store import Store, open_store
from producers.coordinator import live_view, sticky
from producers.coordinator.packing import Draft
from tests.support.brokers import Broker
from tests.support.coordinators import MODEL, FakeWorker, Running, check_outputs, coordinating, make_batch, wait_status
from tests.support.ports import wait_until

GROUP, GROUPS = 200, 12
#: Each row has 4 KiB in common with the one before it, but for the first of each group.
SHARED = np.tile(np.append(0, np.full(GROUP - 1, 4096)), GROUPS)


@pytest.fixture
def store(fleet_settings: Settings) -> Store:
    assert fleet_settings.store.url is not None
    return open_store(fleet_settings.store.url)


@contextlib.contextmanager
def fleet(
    fleet_settings: Settings, store: Store, **scheduling: Any
) -> Iterator[tuple[Running, FakeWorker, FakeWorker]]:
    """A coordinator that knows two workers."""
    # What a worker at its gate has fetched from the shared queue is soon sent again.
    scheduler = msgspec.structs.replace(
        fleet_settings.scheduler, chunk_requests=50, queue_size=1000, unclaimed_s=2, **scheduling
    )
    settings = msgspec.structs.replace(fleet_settings, scheduler=scheduler)
    with (
        FakeWorker(settings, node="one", prefetch=1) as one,
        FakeWorker(settings, node="other", prefetch=1) as other,
        coordinating(settings, store) as running,
    ):
        wait_until(lambda: {w.node for w in running.core.workers or []} == {"one", "other"}, 30, "both are known")
        yield running, one, other


@pytest.fixture
def two(
    fleet_settings: Settings, store: Store, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Running, FakeWorker, FakeWorker]]:
    monkeypatch.setattr(live_view, "PERIOD_S", 0.1)
    with fleet(fleet_settings, store) as running:
        yield running


def test_where_no_groups_are_wanted_all_goes_to_whoever_takes_it(
    fleet_settings: Settings, store: Store, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_view, "PERIOD_S", 0.1)
    targets: set[str] = set()
    route = sticky.route

    def routed(drafted: Draft, seen: sticky.View, shared: sticky.Shared) -> Draft:
        drafted = route(drafted, seen, shared)
        targets.add(drafted.node)
        return drafted

    monkeypatch.setattr(sticky, "route", routed)
    with fleet(fleet_settings, store, sticky_prefixes=False):
        wait_status(store, make_batch(store, GROUP * GROUPS, shared=SHARED), "completed")
    assert targets == {""}


def test_a_group_stays_with_one_worker(two: tuple[Running, FakeWorker, FakeWorker], store: Store) -> None:
    _, one, other = two
    batch = make_batch(store, GROUP * GROUPS, shared=SHARED)
    wait_status(store, batch, "completed")
    check_outputs(store, batch)
    homes = [Counter(pos // GROUP for _, pos in worker.answered) for worker in (one, other)]
    assert all(homes), "both have work"
    whole = sum(max(home[group] for home in homes) == GROUP for group in range(GROUPS))
    # All but those that are shared out at the end: what is left then, and a group that either was at.
    assert whole >= GROUPS - 4


def test_what_waits_for_a_slow_worker_is_stolen(two: tuple[Running, FakeWorker, FakeWorker], store: Store) -> None:
    running, slow, quick = two
    stolen = metrics.CHUNKS_STOLEN.labels(model=MODEL)._value.get()
    for worker in (slow, quick):
        worker.gate.clear()
    batch = make_batch(store, GROUP * GROUPS, shared=SHARED)

    def left() -> int:
        return GROUP * GROUPS - len(set(quick.answered))

    def own() -> int:
        return sum(chunk.target == "one" for chunk in list(running.core.book.out.values()))

    wait_until(lambda: slow.holding.is_set() and own() > 1, 30, "the slow one has a chunk, and more in its queue")
    held = slow.taken[0]
    quick.gate.set()
    wait_until(lambda: left() <= sum(s.end - s.start for s in held.slices), 60, "all others are answered")
    assert metrics.CHUNKS_STOLEN.labels(model=MODEL)._value.get() > stolen
    slow.gate.set()
    wait_status(store, batch, "completed")
    check_outputs(store, batch)
    wait_until(lambda: not running.core.book.out, 30, "nothing is out")
