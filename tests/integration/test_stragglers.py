"""One slow worker among real ones: what it keeps at the end is answered by another, and it lets go of it."""

from __future__ import annotations

import contextlib

import msgspec

from common import metrics
from common.live import LiveState
from common.messages import infer_queue
from common.settings import Settings
from common.store import open_store
from tests.conftest import ECHO_MODEL
from tests.support.brokers import Broker
from tests.support.chunks import StartWorker, chat
from tests.support.coordinators import check_outputs, coordinating, make_batch, status_of, wait_status
from tests.support.ports import wait_until
from tests.support.processes import Processes


def test_a_slow_workers_rest_is_answered_by_an_idle_one(
    fleet_settings: Settings, broker: Broker, start_worker: StartWorker, processes: Processes
) -> None:
    scheduler = msgspec.structs.replace(fleet_settings.scheduler, chunk_requests=50)
    settings = msgspec.structs.replace(fleet_settings, scheduler=scheduler)
    assert settings.store.url is not None
    store = open_store(settings.store.url)
    start_worker("--name", "fast", BATCHMILL_ECHO_LATENCY_MS=50)
    # Without second copies, the batch would wait for this one until long after the test has failed.
    start_worker("--name", "slow", BATCHMILL_ECHO_LATENCY_MS=600_000)
    copied = metrics.CHUNKS_COPIED.labels(model=ECHO_MODEL)._value.get()
    batch = make_batch(store, 1000, body=chat("hello"))
    with coordinating(settings, store):
        wait_status(store, batch, "completed", timeout=90)
        check_outputs(store, batch)
        status = status_of(store, batch)
        assert status.request_counts.completed == 1000
        # What the slow one had taken, and no more than that.
        assert 0 < status.resent < 500
        assert metrics.CHUNKS_COPIED.labels(model=ECHO_MODEL)._value.get() > copied
        # It was told that nobody waits for it, and acknowledged what it had.
        with contextlib.closing(LiveState(settings)) as live:
            wait_until(lambda: not any(w.running + w.waiting for w in live.workers()), 30, "the slow worker is idle")
        for name in [infer_queue(ECHO_MODEL), *(q for q in broker.queues() if q.startswith("infer."))]:
            broker.wait_depth(name, ready=0, unacked=0)
