"""Messages that come twice, in another order, too late, changed, or from somebody who means ill."""

from __future__ import annotations

import contextlib
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from common.broker import codecs, connect, queue
from common.ids import new_chunk_id
from common.messages import TASK_INFER, VERSION, Results, encode, infer_queue
from common.publisher import Publisher
from tests.conftest import ECHO_MODEL
from tests.fault.fleet import READY, Fleet
from tests.fault.table import case
from tests.support.chunks import RESULTS, chat, make_chunk
from tests.support.ports import free_port, wait_until

QUEUE = infer_queue(ECHO_MODEL)


class Copy(NamedTuple):
    """A message as it was."""

    body: bytes
    headers: dict[str, Any]
    properties: dict[str, Any]


class Meddler:
    """Somebody with access to the broker, and on request with the fleet's keys."""

    def __init__(self, fleet: Fleet) -> None:
        self.settings = fleet.settings
        self.chunks, self.results = codecs(self.settings)
        self._publisher = Publisher(self.settings)

    def take(self, name: str, most: int, *, keep: bool) -> list[Copy]:
        """Up to `most` messages that wait in a queue; `keep`: they stay in it."""
        found: list[Any] = []
        copies = []
        connection = connect(self.settings)
        bound = queue(self.settings, name).bind(connection.channel())
        while len(found) < most and (message := bound.get(no_ack=False)) is not None:
            found.append(message)
            known = {"correlation_id": message.properties.get("correlation_id")}
            copies.append(Copy(bytes(message.body), dict(message.headers), known))
        for message in found:
            message.requeue() if keep else message.ack()
        connection.release()
        return copies

    def put(self, name: str, copy: Copy) -> None:
        """Publish it (again)."""
        self._publisher.publish(name, copy.body, headers=copy.headers, **copy.properties)
        # Between two of them may be more than a connection without heartbeats lives.
        self._publisher.close()

    def put_chunk(self, blob: bytes, chunk_id: str) -> None:
        """A blob in the guise of a chunk."""
        self._publisher.begin_task(QUEUE, TASK_INFER, chunk_id, blob, "batch=x chunk=y requests=1")
        self._publisher.settle()

    def put_json(self, name: str, body: Any, headers: dict[str, Any]) -> None:
        """A message as other programs write it."""
        self._publisher.publish(name, body, headers=headers, serializer_name="json")

    def close(self) -> None:
        self._publisher.close()


@contextlib.contextmanager
def meddling(fleet: Fleet) -> Iterator[Meddler]:
    meddler = Meddler(fleet)
    try:
        yield meddler
    finally:
        meddler.close()


def flipped(blob: bytes) -> bytes:
    middle = len(blob) // 2
    return blob[:middle] + bytes([blob[middle] ^ 1]) + blob[middle + 1 :]


@case("20a", "messages duplicated and reordered", quick="redis")
def test_messages_duplicated_and_reordered(fleet: Fleet) -> None:
    fleet.start(workers=0)
    fleet.submit()
    with meddling(fleet) as meddler:
        wait_until(lambda: fleet.broker.depth(QUEUE).ready >= 3, 30, "chunks wait")
        with fleet.fault():
            taken = meddler.take(QUEUE, 8, keep=False)
            for copy in reversed(taken):
                meddler.put(QUEUE, copy)
                meddler.put(QUEUE, copy)
            for worker in [fleet.start_worker() for _ in range(2)]:
                worker.wait_line(READY, 60)
            # The same with results, which wait while the coordinator sleeps.
            fleet.coordinators[0].signal(signal.SIGSTOP)
            wait_until(lambda: fleet.broker.depth(RESULTS).ready >= 4, 60, "results wait")
            for copy in reversed(meddler.take(RESULTS, 4, keep=False)):
                meddler.put(RESULTS, copy)
                meddler.put(RESULTS, copy)
            fleet.coordinators[0].signal(signal.SIGCONT)
    fleet.finish()


@pytest.fixture
def metrics(fleet: Fleet) -> str:
    """URL of the coordinator's metrics."""
    port = free_port()
    fleet.env["BATCHMILL_TELEMETRY_METRICS_PORT"] = str(port)
    return f"http://127.0.0.1:{port}/metrics"


def value(url: str, name: str) -> float:
    """A metric's value now."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@case("20b", "messages of an ended batch replayed: dropped, counted", quick="rabbitmq")
def test_messages_of_an_ended_batch_replayed(fleet: Fleet, metrics: str) -> None:
    first = fleet.start_coordinator()
    first.wait_line(r"\bleads\b", 60)
    del fleet.env["BATCHMILL_TELEMETRY_METRICS_PORT"]
    ended = fleet.submit(200)
    with meddling(fleet) as meddler:
        wait_until(lambda: fleet.broker.depth(QUEUE).ready >= 1, 30, "a chunk waits")
        chunks = meddler.take(QUEUE, 2, keep=True)
        fleet.start(coordinators=0)
        first.signal(signal.SIGSTOP)
        wait_until(lambda: fleet.broker.depth(RESULTS).ready >= 1, 60, "results wait")
        results = meddler.take(RESULTS, 2, keep=True)
        first.signal(signal.SIGCONT)
        wait_until(lambda: fleet.status(ended).status == "completed", 60, "the first batch ends")
        output = fleet.store.read(f"batches/{ended.id}/output.jsonl")
        repeated = value(metrics, "batchmill_results_repeated_total")
        fleet.submit()
        fleet.wait_progress(0.3)
        with fleet.fault():
            for copy in results:
                meddler.put(RESULTS, copy)
            for copy in chunks:
                meddler.put(QUEUE, copy)
        fleet.wait_recovered()
        wait_until(lambda: value(metrics, "batchmill_results_repeated_total") > repeated, 60, "they are counted")
    fleet.finish()
    assert fleet.store.read(f"batches/{ended.id}/output.jsonl") == output


@case("20c", "messages tampered with, of another version or type, or with callbacks smuggled in")
def test_bad_messages(fleet: Fleet) -> None:
    fleet.start()
    fleet.submit()
    fleet.wait_progress(0.1)
    bodies = [chat("stolen")]
    with meddling(fleet) as meddler:
        good = make_chunk(bodies, ECHO_MODEL)
        old = msgspec.structs.replace(good, id=new_chunk_id(), v=VERSION - 1)
        answer = Results(VERSION, good.id, ECHO_MODEL, "n", 0, True, [])
        older = msgspec.structs.replace(answer, v=VERSION - 1)
        # What Celery would obey: a callback that publishes a task when this one is done.
        callback: dict[str, Any] = {"task": "canary", "args": [], "options": {"queue": "canary"}, "subtask_type": None}
        smuggled = [[], {}, {"callbacks": [callback], "errbacks": [callback], "chain": [callback], "chord": None}]
        named = {"task": TASK_INFER, "id": new_chunk_id(), "lang": "py"}
        before = fleet.dead_letters()
        with fleet.fault():
            meddler.put_chunk(flipped(meddler.chunks.seal(QUEUE, encode(good))), good.id)
            meddler.put_chunk(meddler.chunks.seal(QUEUE, encode(old)), old.id)
            # Signed for another direction, and for another queue.
            meddler.put_chunk(meddler.results.seal(QUEUE, encode(good)), new_chunk_id())
            meddler.put_chunk(meddler.chunks.seal("infer.other.1", encode(good)), new_chunk_id())
            meddler.put_json(QUEUE, smuggled, named)
            meddler.put_json(QUEUE, {"prompt": "?"}, {})
            for blob in (
                flipped(meddler.results.seal(RESULTS, encode(answer))),
                meddler.results.seal(RESULTS, encode(older)),
                meddler.chunks.seal(RESULTS, encode(answer)),
            ):
                meddler.put(RESULTS, Copy(blob, {}, {}))
            meddler.put_json(RESULTS, smuggled, named)
        sent = 10
        wait_until(lambda: fleet.dead_letters() == before + sent, 60, "each is recorded")
    fleet.finish()
    assert fleet.dead_letters() == before + sent
    assert fleet.broker.depth("canary").ready == 0
    assert "stolen" not in "".join(process.text for process in fleet.processes.started)
