"""The pool settles whatever a task does, and loses neither slot nor message."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Reject, Terminated
from kombu.asynchronous import Hub, set_event_loop
from kombu.message import Message

from workers import pool as pool_module
from workers.abort import Abort
from workers.engine.base import EngineStats
from workers.pool import EnginePool, Job


class FakeNode:
    """What the pool needs of a node; `hold` keeps chunks running until it is set."""

    def __init__(self) -> None:
        self.name, self.model, self.state = "n", "m@1", "loading"
        self.settings = SimpleNamespace(inference=SimpleNamespace(drain_s=5.0))
        self.announced: list[str] = []
        announce = lambda: self.announced.append(self.state)  # noqa: E731
        self.leases = SimpleNamespace(start=lambda: None, wake=lambda: None, announce=announce)
        self.thread = SimpleNamespace(start=lambda give_up: give_up(), ready=False)
        self.outbox = SimpleNamespace(close=lambda: None)
        self.runs: dict[str, Any] = {}
        self.aborted: list[tuple[str, Abort]] = []
        self.hold = threading.Event()
        self.outstanding = 0
        self.closed = False

    def open_lane(self) -> None:
        self.state = "ready"

    def abort(self, chunk_id: str, reason: Abort) -> None:
        self.aborted.append((chunk_id, reason))
        self.hold.set()

    def abort_all(self, reason: Abort) -> None:
        self.abort("*", reason)

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def pool(node: FakeNode) -> Iterator[EnginePool]:
    found = EnginePool(2, app=SimpleNamespace(batchmill_node=node))
    found.start()
    yield found
    node.hold.set()
    found.stop()


class Settled:
    """Callbacks that tell what became of a task."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.value: Any = None
        self.accepted: list[int] = []

    def options(self, chunk_id: str = "c") -> dict[str, Any]:
        return {
            "correlation_id": chunk_id,
            "callback": self._take,
            "error_callback": self._take,
            "accept_callback": lambda pid, _at: self.accepted.append(pid),
        }

    def _take(self, value: Any) -> None:
        self.value = value
        self.event.set()

    def get(self) -> Any:
        assert self.event.wait(60)
        return self.value


def test_a_worker_is_announced_as_ready_before_its_first_chunk(pool: EnginePool, node: FakeNode) -> None:
    assert node.announced == ["ready"]


def test_a_result_goes_to_the_callback(pool: EnginePool) -> None:
    settled = Settled()
    job = pool.apply_async(lambda a, b: (0, a + b, 0.1), (1,), {"b": 2}, **settled.options())
    assert settled.get() == (0, 3, 0.1)
    assert settled.accepted == [job.id]


@pytest.mark.parametrize(
    "trouble", [SystemExit(1), MemoryError(), KeyboardInterrupt(), ValueError("x"), GeneratorExit()]
)
def test_what_comes_through_the_tracer_requeues_and_keeps_the_slot(pool: EnginePool, trouble: BaseException) -> None:
    def broken() -> None:
        raise trouble

    for _ in range(8):  # more than there are threads
        settled = Settled()
        pool.apply_async(broken, **settled.options())
        exception = settled.get().exception
        exception = getattr(exception, "exc", exception)
        assert isinstance(exception, Reject)
        assert exception.requeue is True
    after = Settled()
    pool.apply_async(lambda: "fine", **after.options())
    assert after.get() == "fine"


class SlowHandOver:
    """A queue that has given its first item away, and whose taker then does not run until `go` is set."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._first = True
        self.given, self.go = threading.Event(), threading.Event()

    def put(self, item: Any) -> None:
        self._queue.put(item)

    def qsize(self) -> int:
        return self._queue.qsize()

    def get(self) -> Any:
        item = self._queue.get()
        if self._first:
            self._first = False
            self.given.set()
            assert self.go.wait(60)
        return item


def test_a_chunk_does_not_wait_for_a_thread_that_has_one(pool: EnginePool) -> None:
    """Two chunks that come one right after the other run at the same time, however slowly the first thread starts."""
    hand = SlowHandOver()
    pool._queue = hand  # type: ignore[assignment]
    both = threading.Barrier(2)
    settled = Settled(), Settled()
    pool.apply_async(lambda: both.wait(20), **settled[0].options("c0"))
    assert hand.given.wait(60)
    pool.apply_async(lambda: both.wait(20), **settled[1].options("c1"))
    hand.go.set()
    assert {settled[0].get(), settled[1].get()} == {0, 1}


def test_terminating_names_the_chunk_and_a_person(pool: EnginePool, node: FakeNode) -> None:
    running, settled = threading.Event(), Settled()

    def task() -> str:
        running.set()
        assert node.hold.wait(60)
        return "ended"

    job = pool.apply_async(task, **settled.options("chunk_1"))
    assert running.wait(60)
    pool.terminate_job(job.id, 15)
    assert settled.get() == "ended"
    assert node.aborted == [("chunk_1", Abort.USER)]
    pool.terminate_job(job.id + 100, 15)  # long gone: nothing


def test_terminated_before_it_started() -> None:
    settled = Settled()
    job = Job(1, lambda: "ran", (), {}, settled.options())
    job.abort = Abort.USER
    job.run()
    exception = settled.get().exception
    assert isinstance(getattr(exception, "exc", exception), Terminated)


def test_jobs_are_held_until_they_are_settled(pool: EnginePool, node: FakeNode) -> None:
    running, settled = threading.Event(), Settled()

    def task() -> None:
        running.set()
        node.hold.wait(5)

    pool.apply_async(task, **settled.options())
    assert running.wait(60)
    assert pool.held == 1
    node.hold.set()
    settled.get()
    pool.stop()
    assert pool.held == 0


class FakeMessage(Message):  # type: ignore[misc]
    """Counts its acks; the thread that ran them is noted."""

    def __init__(self) -> None:
        super().__init__(body=b"")
        self.acked_on: threading.Thread | None = None

    def ack_log_error(self, *_: Any, **__: Any) -> None:
        self.acked_on = threading.current_thread()


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()
    set_event_loop(found)
    yield found
    set_event_loop(None)
    found.close()


def test_a_drain_runs_timers_and_acks_on_the_main_thread_and_reads_no_socket(
    pool: EnginePool, node: FakeNode, hub: Hub
) -> None:
    message, beats = FakeMessage(), list[threading.Thread]()
    reads: list[str] = []
    running, settled = threading.Event(), Settled()

    def task() -> None:
        running.set()
        assert node.hold.wait(60)

    def beat() -> None:
        beats.append(threading.current_thread())
        if len(beats) == 3:
            # Heartbeats went on while the chunk ran; now let it end, and its ack come from its own thread.
            hub.call_soon(message.ack_log_error)
            node.hold.set()

    hub.timer.call_repeatedly(0.02, beat)
    hub.call_soon(reads.append, "a socket reader")
    pool.apply_async(task, **settled.options())
    assert running.wait(60)
    pool.close()
    pool.stop()
    assert len(beats) >= 3
    assert set(beats) == {threading.main_thread()}
    assert message.acked_on is threading.main_thread()
    assert reads == []
    assert node.closed


def test_at_the_deadline_chunks_are_given_back(pool: EnginePool, node: FakeNode) -> None:
    node.settings.inference.drain_s = 0.1
    running, settled = threading.Event(), Settled()

    def task() -> None:
        running.set()
        assert node.hold.wait(60)
        raise Reject("given back", requeue=True)

    pool.apply_async(task, **settled.options())
    assert running.wait(60)
    pool.close()
    pool.stop()
    assert node.aborted == [("*", Abort.DRAIN)]
    assert settled.get() is not None
    assert node.closed
    pool.stop()  # Celery may ask twice


def test_a_closed_pool_starts_nothing(pool: EnginePool) -> None:
    pool.close()
    settled = Settled()
    pool.apply_async(lambda: 1, **settled.options())
    pool.stop()
    assert not settled.event.is_set()


def test_info_is_plain_data(pool: EnginePool) -> None:
    import json

    info = pool.info
    assert json.loads(json.dumps(info))["model"] == ["m@1"]
    assert info["max-concurrency"] == 2


def test_a_callback_that_raises_ends_the_process() -> None:
    """Nobody would know any more what became of the message."""
    script = """
import sys, threading
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from tests.unit.test_worker_pool import FakeNode
from workers.pool import EnginePool
pool = EnginePool(1, app=SimpleNamespace(batchmill_node=FakeNode()))
pool.start()
def broken(value):
    raise RuntimeError('no')
pool.apply_async(lambda: 1, callback=broken)
threading.Event().wait(20)
"""
    root = Path(pool_module.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 70, done.stderr
    assert "a pool callback failed: RuntimeError; exit 70" in done.stderr
