"""One worker process: what its pool, its task and its threads share, and the way of a chunk through it."""

from __future__ import annotations

import faulthandler
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from common import logs, metrics
from common.broker import codecs
from common.errors import BadMessage, BatchmillError
from common.ids import is_batch_id
from common.live import LiveState, WorkerFacts
from common.messages import Chunk, Kind, Results, Row, decode_chunk, decode_rows, encode, infer_queue, node_queue
from common.registry import Registry
from common.settings import Settings
from common.urls import URLS
from workers import parent
from workers.abort import Abort
from workers.breadcrumb import BREADCRUMB, Breadcrumb
from workers.cache.fingerprint import fingerprint
from workers.cache.key import Space
from workers.cache.memory import Memory
from workers.cache.result_cache import ResultCache
from workers.cache.template_clock import Clock, clock_of
from workers.cache.uncached import Uncached
from workers.chunk import ChunkRun, ChunkWork
from workers.engine import loader, warm_up
from workers.engine.base import EngineStats
from workers.engine_thread import EngineThread
from workers.health import Health, Verdict
from workers.lane import Lane, inside_limit
from workers.lease import Leases
from workers.models.source import model_folder
from workers.outbox import Abandoned, Outbox

if TYPE_CHECKING:
    from workers.gate import Gate

#: Exit status of a worker whose engine died or whose pool broke; its supervisor starts a new one.
EXIT_ENGINE = 70
#: Exit status of a worker whose requests failed while others' did not (EX_TEMPFAIL).
EXIT_SICK = 75
#: Seconds that chunks have, after the engine died, to publish what was answered before.
LAST_WORDS_S = 3.0
#: Seconds the engine has to stop.
STOP_S = 20.0
#: Seconds after which an engine's loop that does not turn is given up.
STUCK_S = 180.0
#: Chunks answered lately, by which a late redelivery is recognised.
REMEMBERED = 1024

_REPLY_TO = re.compile(r"^results\.\d{1,4}$")

log = logs.get(__name__)


class Ending(Enum):
    """How a chunk's task ends, and so what becomes of its message."""

    #: Settled: acknowledge.
    DONE = "done"
    #: Another worker's now: requeue.
    REQUEUE = "requeue"
    #: Stopped by a person: Celery acknowledges it as revoked.
    TERMINATED = "terminated"


class Node:
    """The parts of a worker, and `infer`, which the task calls."""

    def __init__(self, settings: Settings, registry: Registry, model: str, name: str) -> None:
        self.settings = settings
        self.model = model
        self.name = name
        #: Which process of this name: no other has it.
        self.life = f"{os.getpid()}.{secrets.token_hex(6)}"
        self._crumb: Breadcrumb | None = None
        self.queues = (infer_queue(model), node_queue(model, name))
        self.state = "loading"
        #: Why the engine could not be loaded.
        self.failure: BatchmillError | None = None
        self.runs: dict[str, ChunkRun] = {}
        self.outbox = Outbox(settings)
        self._entry = registry.get(model)
        # Now, since a mistake in them would be found only after the weights were loaded.
        warm = warm_up.prompts(model, self._entry, registry.where)
        self.thread = EngineThread(
            lambda: loader.load(settings, registry, model),
            self._engine_died,
            lambda engine: warm_up.run(engine, model, warm, settings.inference.request_timeout_s),
        )
        self._lane: Lane | None = None
        self._chunks, self._results = codecs(settings)
        #: Called, from any thread, when the engine runs low on requests.
        self.on_low: Callable[[], object] | None = None
        #: Chunks that have ended so far.
        self.ended = 0
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._uncached = Uncached()
        self._space = Space(model, "")
        self._cache = ResultCache(settings, model) if settings.cache.url and self._entry.cache != "off" else None
        if self._cache is not None:
            self._cache.check()
        self._lock = threading.Lock()
        self._started_at = time.time()
        self._supervisor = parent.supervisor_pid() or 0
        self.health = Health(settings.inference.sick_window, settings.inference.sick_share)
        #: False while it takes no chunks though it is connected.
        self.taking = True
        #: By which it does so; there once it is connected.
        self.gate: Gate | None = None
        self.leases = Leases(
            LiveState(settings),
            name,
            settings.scheduler.lease_s,
            self.runs,
            self.facts,
            self._tick,
            settings.broker.heartbeat_s / 3,
            self.life,
        )

    @property
    def outstanding(self) -> int:
        """Requests inside the engine or waiting for it; 0 until it is ready."""
        return self._lane.outstanding if self._lane is not None else 0

    @property
    def enough(self) -> int:
        """Outstanding requests that keep the engine full."""
        return self._lane.limit if self._lane is not None else 0

    @property
    def counts_outstanding(self) -> bool:
        """False for an engine that answers in bulk: it is never short of requests."""
        return self.thread.ready and not hasattr(self.thread.engine, "infer_bulk")

    def open_lane(self) -> None:
        """The engine is ready: let requests in."""
        facts = self.thread.engine.facts()
        self._crumb = self._drop_crumb(inside_limit(facts.max_num_seqs))
        self._lane = Lane(self.thread, self._low, self._crumb)
        mark = fingerprint(self.model, self._entry, facts)
        self._space = Space(self.model, mark, everything=self._entry.cache == "all", clock=self._template_clock())
        self.state = "ready"

    def stats(self) -> EngineStats:
        """The engine's gauges, requests that still wait for it included."""
        if not self.thread.ready:
            return EngineStats()
        stats = self.thread.engine.stats()
        waiting = self.outstanding - self._lane.inside if self._lane is not None else 0
        return EngineStats(running=stats.running, waiting=stats.waiting + waiting, kv_usage=stats.kv_usage)

    def facts(self) -> WorkerFacts:
        """What others may know of this worker."""
        # Read first: who is told "ready" must find the engine's facts beside it.
        state = self.state
        facts = self.thread.engine.facts() if self.thread.ready else None
        stats = self.stats()
        return WorkerFacts(
            node=self.name,
            model=self.model,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=facts.device if facts is not None else "",
            engine=facts.engine if facts is not None else self.settings.inference.engine,
            state=state,
            max_num_seqs=facts.max_num_seqs if facts is not None else 0,
            chunks_in_flight=self.settings.inference.chunks_in_flight,
            running=stats.running,
            waiting=stats.waiting,
            started_at=self._started_at,
            tried=self.health.tried,
            failing=round(self.health.failing, 3),
            cache=self._cache.facts if self._cache is not None else None,
            supervisor=self._supervisor,
        )

    def infer(self, task_id: str, queue: str, blob: bytes, *, redelivered: bool) -> tuple[Ending, str]:
        """Take a chunk from its message to its last confirmed result; the second value is a word for the log."""
        if self.thread.dead:
            self._park()
        try:
            chunk, rows = self._open(task_id, queue, blob)
        except BadMessage as exc:
            log.warning("bad message", queue=queue, reason=exc.reason)
            self.outbox.bury(blob, exc.reason, queue)
            return Ending.DONE, "dead-lettered"
        if redelivered and chunk.id in self._answered:
            return Ending.DONE, "answered already"
        not_ours = self.leases.take(chunk.id)
        if not_ours is not None:
            return Ending.DONE, not_ours
        ending = self._run(chunk, rows)
        if ending[0] is Ending.REQUEUE:
            self.leases.give_back(chunk.id)
        return ending

    def abort(self, chunk_id: str, reason: Abort) -> None:
        """Give up a chunk, if it runs here."""
        run = self.runs.get(chunk_id)
        if run is not None:
            run.work.abort(reason)

    def abort_all(self, reason: Abort) -> None:
        """Give up every chunk."""
        for run in list(self.runs.values()):
            run.work.abort(reason)

    def close(self) -> None:
        """Stop everything; may be called again."""
        if self._crumb is not None and not self.runs:
            self._crumb.remove()
        self.outbox.close()
        self.leases.close()
        if self._cache is not None:
            self._cache.close()
        if not self.thread.stop(STOP_S):
            die("the engine did not stop")

    def _open(self, task_id: str, queue: str, blob: bytes) -> tuple[Chunk, list[list[Row]]]:
        # The queue's name comes with the message, so it counts only as one of those we consume.
        if queue not in self.queues:
            raise BadMessage("names a queue this worker does not serve")
        chunk = decode_chunk(self._chunks.open(queue, blob))
        if chunk.id != task_id:
            raise BadMessage("its task id is not the chunk's")
        if chunk.model != self.model:
            raise BadMessage("is for another model version")
        if not _REPLY_TO.match(chunk.reply_to):
            raise BadMessage("reply_to is no results queue")
        rows = []
        for part in chunk.slices:
            if not is_batch_id(part.batch):
                raise BadMessage("has a malformed batch id")
            decoded = decode_rows(part.rows)
            if not all(part.start <= row.pos < part.end and 0 <= row.url < len(URLS) for row in decoded):
                raise BadMessage("has a row outside its slice or an unknown url")
            rows.append(decoded)
        return chunk, rows

    def _run(self, chunk: Chunk, rows: list[list[Row]]) -> tuple[Ending, str]:
        assert self._lane is not None
        number = self._crumb.hold(chunk) if self._crumb is not None else -1
        work = ChunkWork(chunk, rows, self.thread, self._lane, number)
        run = ChunkRun(
            chunk,
            work,
            self.name,
            lambda results: self._send(chunk, results),
            self._memory_for(chunk),
            self._space.fingerprint,
        )
        self.runs[chunk.id] = run
        self.leases.wake()
        count = sum(len(part) for part in rows)
        try:
            reason = run.run()
            if reason is None:
                self._remember(chunk.id)
            if reason is Abort.ENGINE:
                # Neither the lease nor the breadcrumb lets go of it: they are what is left to tell of it.
                del self.runs[chunk.id]
                self._park()
        except Abandoned as exc:
            log.warning("chunk given back", chunk=chunk.id, reason=str(exc))
            return Ending.REQUEUE, "given back"
        except BaseException as exc:
            # Whatever it was, the chunk gets its final message and the thread its next chunk. The text of the
            # exception stays here: it may quote a prompt.
            log.error("chunk failed", chunk=chunk.id, error=type(exc).__name__)
            work.abort(Abort.USER)
            try:
                run.fail("chunk_failed", f"the worker could not run it: {type(exc).__name__}")
            except Abandoned:
                return Ending.REQUEUE, "given back"
            return Ending.DONE, f"failed: {type(exc).__name__}"
        finally:
            del self.runs[chunk.id]
            with self._lock:
                self.ended += 1
            if self._crumb is not None:
                self._crumb.release(number)
            self.leases.drop(chunk.id)
        match reason:
            case Abort.DRAIN:
                return Ending.REQUEUE, "given back"
            case Abort.USER:
                return Ending.TERMINATED, "terminated"
            case Abort.EXPIRED:
                return Ending.DONE, "too late"
        return Ending.DONE, f"requests={count}"

    def _drop_crumb(self, slots: int) -> Breadcrumb | None:
        """The breadcrumb that the supervisor reads; none where nobody would."""
        path = os.environ.get(BREADCRUMB)
        if not path:
            return None
        try:
            return Breadcrumb(Path(path), node=self.name, model=self.model, life=self.life, slots=slots)
        except OSError as exc:
            log.warning("no breadcrumb: a crash will not tell which requests were inside", error=str(exc))
            return None

    def _template_clock(self) -> Clock:
        """What the model's chat template prints of the time; the echo engine has no template."""
        if self.settings.inference.engine == "echo":
            return Clock.NONE
        return clock_of(model_folder(self.model, self._entry, self.settings), self._entry.engine)

    def _memory_for(self, chunk: Chunk) -> Memory | None:
        cache = self._cache if chunk.cache != "off" else None
        if chunk.cache != "off" and not self.settings.cache.url:
            self._uncached.note(chunk)
        # An engine that answers in bulk takes a whole chunk in one call; suspects are judged each for itself.
        share = self._entry.cache != "off" and self.counts_outstanding and not chunk.isolated
        return Memory(cache, self._space, chunk, share=share) if cache is not None or share else None

    def _send(self, chunk: Chunk, results: Results) -> None:
        queue = chunk.reply_to
        if self._cache is not None and chunk.cache != "off":
            results.cache = self._cache.facts
        self.outbox.publish(queue, self._results.seal(queue, encode(results)))
        self._count(results)
        if all(part.attempt == 1 for part in chunk.slices):
            # What was tried before has failed before: that says nothing of this machine.
            bad = sum(part.kind.count(Kind.RETRY) for part in results.parts)
            asked = sum(len(part.kind) - part.usage.cache_hits - part.usage.shared for part in results.parts)
            with self._lock:
                self.health.note(asked - bad, bad)

    def _count(self, results: Results) -> None:
        for part in results.parts:
            for kind in Kind:
                number = part.kind.count(kind)
                if number:
                    metrics.RESULTS_SENT.labels(model=self.model, kind=kind.name.lower()).inc(number)
            metrics.TOKENS.labels(model=self.model, type="prompt").inc(part.usage.prompt_tokens)
            metrics.TOKENS.labels(model=self.model, type="completion").inc(part.usage.completion_tokens)
            metrics.TOKENS.labels(model=self.model, type="cached").inc(part.usage.cached_tokens)
            metrics.REQUESTS_SHARED.labels(model=self.model).inc(part.usage.shared)
            metrics.CACHE_SERVED.inc(part.usage.cache_bytes)
        if results.done:
            metrics.CHUNK_SECONDS.labels(model=self.model).observe(results.elapsed_s)

    def _gauge(self) -> None:
        stats = self.stats()
        metrics.ENGINE_RUNNING.labels(model=self.model).set(stats.running)
        metrics.ENGINE_WAITING.labels(model=self.model).set(stats.waiting)
        metrics.ENGINE_KV_USAGE.labels(model=self.model).set(stats.kv_usage)
        metrics.CHUNKS_RUNNING.labels(model=self.model).set(len(self.runs))
        metrics.DRAINING.labels(model=self.model).set(self.state == "draining")
        metrics.SICK.labels(model=self.model).set(self.state == "sick")
        metrics.FAILING.labels(model=self.model).set(self.health.failing)

    def _remember(self, chunk_id: str) -> None:
        with self._lock:
            self._answered[chunk_id] = None
            if len(self._answered) > REMEMBERED:
                self._answered.popitem(last=False)

    def _tick(self) -> None:
        self.outbox.tick()
        self._gauge()
        turned_at = self.thread.turned_at
        if turned_at and not self.thread.dead and self.state != "draining" and time.monotonic() - turned_at > STUCK_S:
            # Leases are renewed by this thread, so nobody else would ever notice.
            faulthandler.dump_traceback()
            die(f"the engine's loop has not turned for {STUCK_S:g} s")
        self._look_after_health()
        if parent.orphaned():
            # The kernel's signal does this on Linux; elsewhere this is all there is.
            die("its supervisor is gone")

    def _look_after_health(self) -> None:
        gate = self.gate
        if gate is None or not (self.state == "sick" or (self.state == "ready" and self.health.suspicious)):
            return
        others = self.leases.others()
        with self._lock:
            failing = self.health.failing
            verdict = self.health.judge(self.facts(), others, time.monotonic())
        match verdict:
            case Verdict.STOP:
                log.error("sick: requests fail here and not elsewhere; taking no more", failing=round(failing, 3))
                self.state, self.taking = "sick", False
                gate.shut()
            case Verdict.RESUME:
                log.warning("requests fail elsewhere too, or nobody else is left; taking chunks again")
                self.state, self.taking = "ready", True
                gate.open()
            case Verdict.END:
                log.error("sick: others answer what failed here; ending", status=EXIT_SICK)
                gate.end(EXIT_SICK)

    def _low(self) -> None:
        on_low = self.on_low
        if on_low is not None:
            on_low()

    def _engine_died(self, reason: str) -> None:
        log.critical("the engine died", reason=reason)
        self.abort_all(Abort.ENGINE)
        threading.Thread(target=self._exit_after_last_words, args=(reason,), daemon=True).start()

    def _exit_after_last_words(self, reason: str) -> None:
        deadline = time.monotonic() + LAST_WORDS_S
        while self.runs and time.monotonic() < deadline:
            time.sleep(0.02)
        die(f"the engine died: {reason}")

    @staticmethod
    def _park() -> None:
        """Never return: the process is about to exit, and returning would acknowledge the message."""
        threading.Event().wait()


def die(reason: str) -> None:
    """End the process at once with status 70; its unacknowledged messages are delivered again."""
    sys.stderr.write(f"workers: {reason}; exit {EXIT_ENGINE}\n")
    sys.stderr.flush()
    os._exit(EXIT_ENGINE)
