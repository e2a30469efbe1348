"""The engine is kept full: requests of several chunks are in it at all times, whatever the slowest of each do."""

from __future__ import annotations

import time

from celery import Celery

from common.broker import make_app
from common.messages import Kind, infer_queue
from common.settings import Settings
from tests.conftest import ECHO_MODEL
from tests.support.brokers import Broker
from tests.support.chunks import Dispatch, StartWorker, chat, make_chunk
from tests.support.ports import wait_until
from workers.devices import node_name

QUEUE = infer_queue(ECHO_MODEL)
SEQS = 16


def outstanding(control: Celery) -> tuple[int, int, int]:
    """(requests in or before the engine, running in it, chunks held), as the worker reports them."""
    answer = None
    for _ in range(12):
        # A worker on a busy machine may be late with its answer.
        answer = control.control.inspect(timeout=5, limit=1).stats()
        if answer:
            break
    assert answer, "the worker does not answer"
    [stats] = answer.values()
    pool = stats["pool"]
    return pool["outstanding-requests"], pool["running-requests"], pool["chunks"]


def test_long_answers_do_not_empty_the_engine(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, fleet_settings: Settings
) -> None:
    """Each chunk has two requests that take far longer than the rest; K chunks alone would wait for those."""
    worker = start_worker(
        BATCHMILL_ECHO_MAX_NUM_SEQS=SEQS,
        BATCHMILL_ECHO_LATENCY_MS=60,
        BATCHMILL_ECHO_FAULTS="LONG=slow:4",
        BATCHMILL_INFERENCE_CHUNKS_IN_FLIGHT=3,
    )
    control = make_app(fleet_settings)
    texts = ["LONG", "LONG", *["short"] * 38]
    chunks = [dispatch.send(make_chunk([chat(t) for t in texts], ECHO_MODEL)) for _ in range(24)]
    samples: list[tuple[int, int, int, int]] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        waiting = broker.depth(QUEUE).ready
        found = outstanding(control)
        # Only while work is queued before and after is the promise in force.
        if broker.depth(QUEUE).ready and waiting:
            samples.append((waiting, *found))
        elif samples:
            break
        # Samples, not a flood: every question is work for the thread that fetches chunks.
        time.sleep(0.05)
    assert len(samples) >= 5, samples
    # Asking keeps the worker's main thread from fetching, and other processes keep it from running: some samples show
    # that. With a barrier nearly all would be low, since a chunk's long requests take twenty times as long as the rest.
    low = [s for s in samples if s[1] < 1.1 * SEQS]
    assert len(low) <= len(samples) / 4, samples
    assert max(s[3] for s in samples) > 3, "never needed more than K chunks: this test tests nothing"
    for chunk in chunks:
        assert set(dispatch.wait(chunk, 90).kinds().values()) == {Kind.OUTPUT}
    broker.wait_depth(QUEUE, ready=0, unacked=0)
    control.close()
    assert worker.stop() == 0


def test_a_full_engine_takes_no_more_than_its_chunks(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, fleet_settings: Settings
) -> None:
    """With large chunks a worker holds K, and leaves the rest to others."""
    # None of them ends while this looks.
    start_worker(
        BATCHMILL_ECHO_MAX_NUM_SEQS=4, BATCHMILL_ECHO_FAULTS="HANG=hang", BATCHMILL_INFERENCE_CHUNKS_IN_FLIGHT=3
    )
    for _ in range(6):
        dispatch.send(make_chunk([chat("HANG")] * 60, ECHO_MODEL, timeout_s=600.0))
    broker.wait_depth(QUEUE, ready=3, unacked=3)
    control = make_app(fleet_settings)
    # Delivered is not yet taken up.
    wait_until(lambda: outstanding(control) == (180, 4, 3), 10, "all three chunks run")
    for _ in range(5):
        requests, running, chunks = outstanding(control)
        assert (requests, running, chunks) == (180, 4, 3)
    control.close()


def test_what_is_for_this_worker_alone_goes_before_all_it_has(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker
) -> None:
    """A chunk that was lost with another worker waits neither for a place nor for the engine's queue."""
    worker = start_worker(
        "--name",
        "survivor",
        BATCHMILL_ECHO_MAX_NUM_SEQS=4,
        BATCHMILL_ECHO_LATENCY_MS=100,
        BATCHMILL_INFERENCE_CHUNKS_IN_FLIGHT=3,
    )
    # Half a minute's work in the first of them.
    large = [dispatch.send(make_chunk([chat("x")] * 1200, ECHO_MODEL)) for _ in range(6)]
    broker.wait_depth(QUEUE, ready=3, unacked=3)
    lost = [
        dispatch.send(make_chunk([chat("y")] * 8, ECHO_MODEL, ahead=True), node=node_name(ECHO_MODEL, "survivor"))
        for _ in range(2)
    ]
    for chunk in lost:
        assert set(dispatch.wait(chunk, 20).kinds().values()) == {Kind.OUTPUT}
    assert not any(dispatch.of(chunk).done for chunk in large)
    worker.kill()
