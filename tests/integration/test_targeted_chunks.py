"""Chunks that go to one worker by its own queue: taken by that one alone, and not lost with it."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from common import live as live_module
from common.messages import node_queue
from common.settings import Settings
from common.store import Store
from producers.coordinator import live_view, losses, packing
from producers.coordinator.packing import Draft
from tests.support.brokers import Broker
from tests.support.coordinators import MODEL, FakeWorker, check_outputs, coordinating, make_batch, wait_status
from tests.support.ports import wait_until


@pytest.fixture
def quick(fleet_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings whose time limits a test can wait for."""
    monkeypatch.setattr(live_view, "PERIOD_S", 0.1)
    monkeypatch.setattr(losses, "GRACE_S", 0.5)
    monkeypatch.setattr(live_module, "WORKER_TTL_S", 2)
    scheduler = msgspec.structs.replace(fleet_settings.scheduler, lease_s=1.5, chunk_requests=50, queue_size=1000)
    inference = msgspec.structs.replace(fleet_settings.inference, batch_size=64)
    return msgspec.structs.replace(fleet_settings, scheduler=scheduler, inference=inference)


@pytest.fixture
def patient(fleet_settings: Settings) -> Settings:
    """The same chunks, and time limits that no busy machine runs into: nothing is asked twice."""
    scheduler = msgspec.structs.replace(
        fleet_settings.scheduler, lease_s=60.0, unclaimed_s=60.0, chunk_requests=50, queue_size=1000
    )
    inference = msgspec.structs.replace(fleet_settings.inference, batch_size=64)
    return msgspec.structs.replace(fleet_settings, scheduler=scheduler, inference=inference)


@pytest.fixture
def aim(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets the first chunks go to one worker."""
    real = packing.draft

    def aim_at(node: str, chunks: int) -> None:
        numbers = itertools.count()

        def draft(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            if isinstance(found, Draft) and next(numbers) < chunks:
                return found._replace(node=node)
            return found

        monkeypatch.setattr(packing, "draft", draft)

    return aim_at


def test_only_the_worker_named_takes_the_chunk(patient: Settings, store: Store, broker: Broker, aim: Any) -> None:
    aim("second", 3)
    batch = make_batch(store, 1000)
    with (
        FakeWorker(patient, node="first") as first,
        FakeWorker(patient, node="second") as second,
        coordinating(patient, store),
    ):
        status = wait_status(store, batch, "completed")
    check_outputs(store, batch)
    assert status.resent == 0
    theirs = {(batch.id, pos) for pos in range(150)}
    assert not theirs & set(first.answered)
    assert theirs <= set(second.answered)
    broker.wait_depth(node_queue(MODEL, "second"), ready=0, unacked=0)


def test_a_chunk_for_a_worker_that_died_goes_to_another(
    quick: Settings, patient: Settings, store: Store, broker: Broker, aim: Any
) -> None:
    aim("dead", 2)
    own = node_queue(MODEL, "dead")
    batch = make_batch(store, 500)
    with FakeWorker(patient, node="other") as other:
        with coordinating(patient, store) as running:
            wait_until(lambda: len(other.answered) == 400, 30, "everything else is answered", 0.01)
            out = running.core.book.out
            wait_until(lambda: [c.target for c in list(out.values())] == ["dead"] * 2, 30, "the two are left", 0.01)
        # Nothing but the ledger tells the next life of them.
        with coordinating(quick, store) as running:
            status = wait_status(store, batch, "completed")
            # What waits for the dead one does not linger, and would not be run.
            broker.wait_depth(own, ready=0, unacked=0)
            assert own not in broker.queues()
            given_up = set(running.core.book.given_up)
    check_outputs(store, batch)
    assert status.resent == 100
    assert len(given_up) == 2
    assert {s.attempt for chunk in other.taken for s in chunk.slices} == {1}
