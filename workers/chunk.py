"""Runs one chunk: its requests go through the lane, its results leave as they come, in confirmed messages.

Two threads meet here. The engine's loop finishes rows; the chunk's own task thread builds, compresses, signs and
publishes, so that none of that work is ever done on the engine's loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from common.messages import TOO_LATE, VERSION, Chunk, Failure, Kind, Results, Row
from common.urls import URLS
from workers.abort import Abort
from workers.attempt import Tried
from workers.cache.memory import Memory
from workers.engine.base import Answer, BulkEngine, EngineDead
from workers.engine_thread import EngineThread
from workers.lane import Lane
from workers.outcome import judge
from workers.results import Done, Source, marks, parts

#: Results are sent when this many, or this many bytes of them, or this many seconds have come together.
FLUSH_RESULTS = 256
FLUSH_BYTES = 256 << 10
FLUSH_S = 2.0
#: Bytes of answers in one message, about; a larger single answer still goes, alone.
MESSAGE_BYTES = 1 << 20
#: Seconds the engine's loop has to let go of an aborted chunk.
ABORT_S = 5.0
#: What the last message of a chunk says that was given up and not for another worker to go on with.
_FAILURES: dict[Abort | None, Failure] = {
    Abort.USER: Failure("terminated", "a person revoked the task"),
    Abort.EXPIRED: Failure(TOO_LATE, "not_after has passed by this worker's clock"),
}


class ChunkWork:
    """The rows of a chunk on their way through the engine. `rows` are per slice, in the chunk's order."""

    def __init__(
        self,
        chunk: Chunk,
        rows: list[list[Row]],
        thread: EngineThread,
        lane: Lane,
        number: int = -1,
    ) -> None:
        """`number`: the chunk's in the breadcrumb."""
        self.ahead = chunk.ahead and not chunk.isolated
        self.timeout_s = chunk.timeout_s
        self.isolated = chunk.isolated
        self._number = number
        self._thread = thread
        self._lane = lane
        self._rows = [(part, row) for part, slice_rows in enumerate(rows) for row in slice_rows]
        self._batches = [s.batch for s in chunk.slices]
        self._names = [s.batch.encode() for s in chunk.slices]
        self._open = bytearray(b"\1" * len(self._rows))
        self._source = bytearray(len(self._rows))
        self._flights: dict[int, bytes] = {}
        self._left = len(self._rows)
        self._done: deque[Done] = deque()
        self._bulk: list[Answer] = []
        self._bulk_rows: list[int] = []
        self._count = 0
        self._bytes = 0
        self._news = threading.Event()
        self._aborted_at = 0.0
        self.reason: Abort | None = None

    # From any thread.

    def start(self) -> None:
        """Let the rows in."""
        if self._left == 0:
            self._news.set()
            return
        bulk = getattr(self._thread.engine, "infer_bulk", None)
        if bulk is None or self.isolated:
            self._thread.call(self._begin)
        else:
            self._thread.submit(self._begin_bulk(self._thread.engine))  # type: ignore[arg-type]

    def rows(self) -> list[tuple[int, Row]]:
        """Every row with the number of its slice."""
        return self._rows

    def answered(self, row: int, body: bytes) -> bool:
        """Before `start`: this row needs no engine, the result cache has its answer; False when that is none."""
        part, wanted = self._rows[row]
        outcome = judge(wanted.url, 200, body)
        if outcome.kind is not Kind.OUTPUT:
            return False
        self._open[row] = 0
        self._left -= 1
        self._done.append(Done(part, wanted, Tried(200, body, outcome), Source.CACHE))
        return True

    def missed(self, row: int) -> None:
        """Before `start`: the result cache was asked for this row in vain."""
        self._source[row] = Source.MISSED

    def may_share(self, row: int, flight: bytes) -> None:
        """Before `start`: rows with the same `flight` have one answer."""
        self._flights[row] = flight

    def abort(self, reason: Abort) -> None:
        """Give up what is not finished. The first reason stands."""
        if self.reason is None:
            self._aborted_at = time.monotonic()
            self.reason = reason
            if reason is Abort.ENGINE:
                self._news.set()
            else:
                self._thread.call(self._drop, lambda _part: True)

    def forget(self, batches: set[str]) -> None:
        """Drop the rows of cancelled batches: they are aborted, and nothing is said of them."""
        wanted = {part for part, batch in enumerate(self._batches) if batch in batches}
        if wanted:
            self._thread.call(self._drop, wanted.__contains__)

    # From the task's thread.

    def take(self, timeout: float) -> tuple[list[Done], bool]:
        """Finished rows for one message, and whether they are the last; waits up to `timeout` seconds for enough."""
        self._news.wait(timeout)
        self._news.clear()
        ended = self._left == 0 or self._given_up()
        self._count = self._bytes = 0
        if self._bulk:
            self._judge_bulk()
        taken: list[Done] = []
        size = 0
        while self._done and size < MESSAGE_BYTES:
            done = self._done.popleft()
            size += len(done.tried.body)
            taken.append(done)
        if self._done:
            self._news.set()
            ended = False
        return taken, ended

    def _given_up(self) -> bool:
        if self.reason is None:
            return False
        return self.reason is Abort.ENGINE or time.monotonic() - self._aborted_at > ABORT_S

    def _judge_bulk(self) -> None:
        answers, self._bulk = self._bulk, []
        for number, answer in zip(self._bulk_rows, answers, strict=True):
            part, row = self._rows[number]
            tried = Tried(answer.status, answer.body, judge(row.url, answer.status, answer.body))
            self._done.append(Done(part, row, tried, self._source[number]))

    # On the engine's loop.

    def request(self, row: int) -> tuple[int, bytes] | None:
        """See `lane.Work`."""
        if not self._open[row]:
            return None
        wanted = self._rows[row][1]
        return wanted.url, wanted.body

    def names(self, row: int) -> tuple[int, bytes, int]:
        """See `lane.Work`."""
        part, wanted = self._rows[row]
        return self._number, self._names[part], wanted.pos

    def flight(self, row: int) -> bytes | None:
        """See `lane.Work`."""
        return self._flights.get(row)

    def alone(self, row: int) -> None:
        """See `lane.Work`."""
        self._flights.pop(row, None)

    def finish(self, row: int, tried: Tried, *, shared: bool = False) -> None:
        """See `lane.Work`."""
        if not self._open[row]:
            return
        self._open[row] = 0
        part, wanted = self._rows[row]
        self._done.append(Done(part, wanted, tried, Source.SHARED if shared else self._source[row]))
        self._count += 1
        self._bytes += len(tried.body)
        self._left -= 1
        if self._left == 0 or self._count >= FLUSH_RESULTS or self._bytes >= FLUSH_BYTES:
            self._news.set()

    def _begin(self) -> None:
        self._lane.enter(self, range(len(self._rows)))

    async def _begin_bulk(self, engine: BulkEngine) -> None:
        self._bulk_rows = [number for number, wanted in enumerate(self._open) if wanted]
        asked = [(URLS[row.url], row.body) for row in (self._rows[number][1] for number in self._bulk_rows)]
        try:
            async with asyncio.timeout(self.timeout_s):
                answers = await engine.infer_bulk(asked)
        except EngineDead as exc:
            self._thread.report_death(str(exc))
        except Exception:
            # One of them spoils the call for all, or it took too long: ask for each, so that one costs one.
            self._begin()
        else:
            if self._left:
                self._bulk = answers
                self._open = bytearray(len(self._rows))
                self._left = 0
                self._news.set()

    def _drop(self, wanted: Callable[[int], bool]) -> None:
        for row, (part, _) in enumerate(self._rows):
            if self._open[row] and wanted(part):
                self._open[row] = 0
                self._left -= 1
                self._lane.drop(self, row)
        if self._left == 0:
            self._news.set()


class ChunkRun:
    """Runs a chunk to its end in the calling thread. `send(results)` returns when the broker confirmed them."""

    def __init__(
        self,
        chunk: Chunk,
        work: ChunkWork,
        node: str,
        send: Callable[[Results], None],
        memory: Memory | None = None,
        fingerprint: str = "",
    ) -> None:
        self.chunk = chunk
        self.work = work
        self._node = node
        self._send = send
        self._seq = 0
        self._began = time.monotonic()
        self._batches = [s.batch for s in chunk.slices]
        self._memory = memory
        self._marks = [marks(chunk.model, s.attempt, fingerprint) for s in chunk.slices]

    @property
    def batches(self) -> set[str]:
        """The batches whose rows it carries."""
        return set(self._batches)

    def run(self) -> Abort | None:
        """Send every result, the last message with `done`; returns why it was given up, if it was."""
        if self._late():
            # Said and not just dropped: this clock may be wrong, and then the coordinator sends the rows again.
            self._publish([], done=True, failure=_FAILURES[Abort.EXPIRED])
            return Abort.EXPIRED
        if self._memory is not None:
            self._memory.recall(self.work)
        self.work.start()
        flushed = time.monotonic()
        while True:
            taken, ended = self.work.take(max(0.0, flushed + FLUSH_S - time.monotonic()))
            if self._late():
                self.work.abort(Abort.EXPIRED)
            reason = self.work.reason
            if ended and reason in (Abort.DRAIN, Abort.ENGINE):
                if taken:
                    self._publish(taken, done=False)
                return reason
            if ended:
                self._publish(taken, done=True, failure=_FAILURES.get(reason))
                return reason
            if taken:
                self._publish(taken, done=False)
            flushed = time.monotonic()

    def fail(self, code: str, message: str) -> None:
        """Send the final message of a chunk that broke; its unanswered rows count as a failed attempt."""
        self._publish([], done=True, failure=Failure(code, message))

    def _late(self) -> bool:
        return bool(self.chunk.not_after) and time.time() > self.chunk.not_after

    def _publish(self, taken: list[Done], *, done: bool, failure: Failure | None = None) -> None:
        results = Results(
            v=VERSION,
            chunk=self.chunk.id,
            model=self.chunk.model,
            node=self._node,
            seq=self._seq,
            done=done,
            parts=parts(taken, self._batches, self._marks, self.chunk.timeout_s),
            failure=failure,
            elapsed_s=round(time.monotonic() - self._began, 3) if done else 0.0,
        )
        self._seq += 1
        self._send(results)
        if self._memory is not None:
            self._memory.keep(taken)
