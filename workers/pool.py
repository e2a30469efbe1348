"""The pool that Celery runs our tasks in: threads that wait for an engine which lives in a thread of its own.

Why none of Celery's pools will do: prefork cannot host an engine (its processes may have no children, and CUDA does not
survive a fork), solo neither sends heartbeats nor sees SIGTERM during a task, and the stock thread pool blocks the main
thread while it drains (acks and heartbeats stop), cannot terminate, and loses a slot to every SystemExit.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from billiard.einfo import ExceptionInfo
from celery.concurrency.base import BasePool
from celery.exceptions import Reject, Terminated, WorkerShutdown
from celery.worker import state as worker_state
from kombu.asynchronous import get_event_loop
from kombu.message import Message

from common import logs
from common.errors import BatchmillError
from workers.abort import Abort
from workers.node import Node, die
from workers.request import release_orphan

#: Seconds between turns of the drain.
TURN_S = 0.05
#: Seconds that aborted chunks have to publish what is done and be requeued.
REQUEUE_S = 10.0
#: Chunk threads, at most; `workers.credit` holds fewer chunks, and RabbitMQ may add K for the worker's own queue.
MAX_THREADS = 64

log = logs.get(__name__)


class Job:
    """One task on its way through the pool. Celery keeps only a weak reference, so the pool holds it until settled."""

    def __init__(self, number: int, target: Callable[..., Any], args: Any, kwargs: Any, options: Any) -> None:
        self.id = number
        self.chunk_id: str = options.get("correlation_id") or ""
        self._target = target
        self._args = args
        self._kwargs = kwargs
        self._callback = options.get("callback")
        self._error_callback = options.get("error_callback")
        self._accept_callback = options.get("accept_callback")
        self.started = False
        self.abort: Abort | None = None

    def run(self) -> None:
        """Run and settle. Whatever the task raises is an outcome; what a callback raises ends the process."""
        if self._accept_callback is not None:
            self._accept_callback(self.id, time.monotonic())
        try:
            if self.abort is Abort.USER:
                raise Terminated("before it started")
            result = self._target(*self._args, **self._kwargs)
        except BaseException as exc:
            # The tracer turns a task's exceptions into results; what comes through (SystemExit, MemoryError) would
            # otherwise take the thread, its slot and the message along.
            failure = exc if isinstance(exc, (Reject, Terminated)) else Reject(type(exc).__name__, requeue=True)
            if failure is not exc:
                log.error("a task broke; its message goes back to the queue", error=type(exc).__name__)
            self._fail(failure)
        else:
            if self._callback is not None:
                self._callback(result)

    def terminate(self, _signal: Any = None) -> None:
        """Celery calls this beside `EnginePool.terminate_job`, which has done the work."""

    def _fail(self, exc: BaseException) -> None:
        try:
            raise exc
        except BaseException:
            info = ExceptionInfo()
        if self._error_callback is not None:
            self._error_callback(info)


class EnginePool(BasePool):  # type: ignore[misc]
    """Owns the node's engine: it is loaded before the consumer connects and stopped after the last chunk is settled."""

    signal_safe = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._node: Node = self.app.batchmill_node
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._stopped = False
        #: Set by a second signal: skip the rest of the drain.
        self.hurry = threading.Event()

    @property
    def held(self) -> int:
        """Chunks that are here and not settled."""
        return len(self._jobs)

    # Celery's side.

    def on_start(self) -> None:
        """Load the engine and block until it answers; a person's SIGTERM ends the wait."""
        # At debug level Celery would log the arguments.
        self._does_debug = False
        self._node.leases.start()
        try:
            self._node.thread.start(_shutdown_if_asked)
        except BatchmillError as exc:
            # Celery would log a traceback of it; the command shows it as one line.
            self._node.failure = exc
            raise WorkerShutdown(exc.exit_code) from None
        self._node.open_lane()
        # Before the first chunk: whoever sees answers finds the worker ready.
        self._node.leases.announce()
        log.info("engine ready", node=self._node.name, model=self._node.model)

    def on_apply(self, target: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Job:
        """Hand a task to a thread. While the pool closes it is only kept, so that its message goes back."""
        job = Job(next(self._numbers), target, args or (), kwargs or {}, options)
        with self._lock:
            self._jobs[job.id] = job
            if self._state != self.RUN:
                return job
            self._queue.put(job)
            # A thread for each chunk that is held. Counting idle threads would not do: one that has just been handed a
            # chunk still looks idle, and the next chunk would wait until another has ended.
            if len(self._threads) < min(len(self._jobs), MAX_THREADS):
                name = f"chunk-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return job

    def terminate_job(self, pid: int, _signal: Any = None) -> None:
        """A person's `revoke(terminate=True)`: `pid` is the job's id. Drains never come this way."""
        job = self._jobs.get(pid)
        if job is not None:
            job.abort = Abort.USER
            self._node.abort(job.chunk_id, Abort.USER)

    def on_stop(self) -> None:
        """Drain, bounded; then give back what runs; only then stop the engine. On the main thread."""
        if self._stopped:
            return
        self._stopped = True
        node = self._node
        node.state = "draining"
        node.leases.wake()
        deadline = time.monotonic() + node.settings.inference.drain_s
        log.info("draining", chunks=len(node.runs), seconds=node.settings.inference.drain_s)
        self._pump(lambda: time.monotonic() > deadline or self.hurry.is_set())
        if self._running():
            log.info("giving chunks back", chunks=len(node.runs))
            node.abort_all(Abort.DRAIN)
            deadline = time.monotonic() + REQUEUE_S
            self._pump(lambda: time.monotonic() > deadline)
        node.outbox.close()
        if self._running():
            deadline = time.monotonic() + 1
            self._pump(lambda: time.monotonic() > deadline)
        for _ in self._threads:
            self._queue.put(None)
        node.close()

    def on_terminate(self) -> None:
        """A cold shutdown: no time for what runs."""
        self.hurry.set()
        self.on_stop()

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()
        node = self._node
        facts = node.thread.engine.facts() if node.thread.ready else None
        stats = node.stats()
        # Words go in lists: Flower rewrites a bare string (`smollm2-135m@1` to "Smollm2 135m@1").
        info |= {
            "max-concurrency": self.limit,
            "model": [node.model],
            "state": [node.state],
            "chunks": len(node.runs),
            "outstanding-requests": node.outstanding,
            "running-requests": stats.running,
            "waiting-requests": stats.waiting,
            "kv-usage": round(stats.kv_usage, 3),
        }
        if facts is not None:
            info |= {
                "engine": [facts.engine],
                "device": [facts.device],
                "max-num-seqs": facts.max_num_seqs,
                "max-model-len": facts.max_model_len,
                "engine-facts": [f"{name}={value}" for name, value in facts.detail.items()],
            }
        return info

    # The threads' side.

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            with self._lock:
                # Between the signal and now the pool may have closed: what has not started goes back to the queue.
                if job is not None and self._state != self.RUN:
                    continue
                if job is not None:
                    job.started = True
            if job is None:
                return
            try:
                job.run()
            except BaseException as exc:
                # A callback failed, so nobody knows any more what Celery thinks of this message.
                log.critical("a pool callback failed", error=type(exc).__name__)
                die(f"a pool callback failed: {type(exc).__name__}")
            with self._lock:
                del self._jobs[job.id]
            self._settled.set()

    def _running(self) -> bool:
        with self._lock:
            return any(job.started for job in self._jobs.values())

    def _pump(self, enough: Callable[[], bool]) -> None:
        """Until no chunk runs: fire the hub's timers (heartbeats, leases) and its ready acks."""
        hub = get_event_loop()
        while True:
            self._settled.clear()
            busy = self._running()
            if hub is not None:
                hub.fire_timers()
                _run_acks(hub)
            if not busy or enough():
                return
            self._settled.wait(TURN_S)


def _run_acks(hub: Any) -> None:
    """Run the acks and rejects that wait in the hub, and nothing else.

    The socket's reader waits in the same set and would hand new deliveries to the closed pool
    (celery/concurrency/prefork.py draws the same line).
    """
    ready = hub._pop_ready()
    while ready:
        callback = ready.pop()
        if not _is_ack(callback):
            hub.call_soon(callback)
            continue
        try:
            callback()
        except Exception as exc:
            log.warning("an ack failed; its message is delivered again", error=type(exc).__name__)


def _is_ack(callback: Any) -> bool:
    function = getattr(callback, "fun", None)
    if function is release_orphan:
        return True
    name = getattr(function, "__name__", "")
    return isinstance(getattr(function, "__self__", None), Message) and name in ("ack_log_error", "reject_log_error")


def _shutdown_if_asked() -> None:
    if worker_state.should_stop is not None or worker_state.should_terminate is not None:
        raise WorkerShutdown(0)
