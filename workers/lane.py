"""The queue before the engine: requests of all chunks, first come first served, a bounded number inside at a time.

Twice `max_num_seqs` inside keeps the engine's own batch full from one step to the next; more would only wait in there,
where its time already counts against the request's timeout.

Equal requests with one answer go in once (`workers.cache.single_flight`): the others wait beside the queue, take no
place in the engine and are not counted, so that it is kept full of requests that are computed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from common.messages import Kind
from workers.attempt import Tried, attempt
from workers.breadcrumb import Breadcrumb
from workers.cache.single_flight import SingleFlight
from workers.engine.base import Engine, EngineDead
from workers.engine_thread import EngineThread

#: Seconds between two calls of `on_low`, at least.
LOW_EVERY_S = 0.02
#: A member of an enumeration is looked up slowly.
_OUTPUT = Kind.OUTPUT


class Work(Protocol):
    """Requests that go through the lane; `workers.chunk.ChunkWork`."""

    timeout_s: float
    #: Above 0: so many of its requests go in at a time, with nothing else inside.
    isolated: int
    #: They go in before those that wait.
    ahead: bool

    def request(self, row: int) -> tuple[int, bytes] | None:
        """Position of the url in `URLS`, and body; None when the row is no longer wanted."""
        ...

    def flight(self, row: int) -> bytes | None:
        """Rows with the same one have one answer; None: this row has to be computed for itself."""
        ...

    def alone(self, row: int) -> None:
        """From now on `flight` is None: the computation that this row waited for gave no answer."""
        ...

    def finish(self, row: int, tried: Tried, *, shared: bool = False) -> None:
        """Take the outcome of a row. `shared`: it is another row's."""
        ...

    def names(self, row: int) -> tuple[int, bytes, int]:
        """For the breadcrumb: the chunk's number there, the batch's id, and the row's position."""
        ...


class _Run:
    """One computation in the engine; whose it is changes when its leader is given up."""

    __slots__ = ("member", "slot", "task")

    def __init__(self, member: tuple[Work, int], slot: int) -> None:
        self.member = member
        self.slot = slot
        self.task: asyncio.Task[None] | None = None


class Lane:
    """All methods run on the engine's loop; the two counts may be read anywhere."""

    def __init__(self, thread: EngineThread, on_low: Callable[[], None], crumb: Breadcrumb | None = None) -> None:
        """`on_low` is called, not too often, while fewer requests than `limit` are outstanding."""
        self._thread = thread
        self._on_low = on_low
        self._told_at = 0.0
        self._crumb = crumb
        #: Whose isolated requests are inside.
        self._isolated: Work | None = None
        self._engine: Engine = thread.engine
        self.limit = inside_limit(self._engine.facts().max_num_seqs)
        self._waiting: deque[tuple[Work, int]] = deque()
        #: How many at its head go before all that come.
        self._ahead = 0
        self._runs: dict[tuple[Work, int], _Run] = {}
        self._flights: SingleFlight[tuple[Work, int]] = SingleFlight()
        #: Requests that are in the engine.
        self.inside = 0

    @property
    def outstanding(self) -> int:
        """Requests inside the engine or before it; enough of them while a request keeps the others out.

        Those that wait for an equal one's answer are neither.
        """
        count = self.inside + len(self._waiting)
        return max(count, self.limit) if self.isolating else count

    @property
    def isolating(self) -> bool:
        """True while an isolated request is inside, or next."""
        return self._isolated is not None or (bool(self._waiting) and self._waiting[0][0].isolated > 0)

    def enter(self, work: Work, rows: range) -> None:
        """Queue rows behind all that are here, or behind those alone that go before the others too."""
        if work.ahead:
            self._waiting.rotate(-self._ahead)
            self._waiting.extendleft((work, row) for row in reversed(rows))
            self._waiting.rotate(self._ahead)
            self._ahead += len(rows)
        else:
            self._waiting.extend((work, row) for row in rows)
        self._pump()

    def drop(self, work: Work, row: int) -> None:
        """Give up a row. Inside the engine it is aborted, unless a row that waits for the same answer takes it over.

        One that is still in the queue is passed over, since `request` says None by then.
        """
        successor = self._flights.leave((work, row))
        run = self._runs.get((work, row))
        if run is None:
            return
        if successor is None:
            assert run.task is not None
            run.task.cancel()
            return
        del self._runs[run.member]
        run.member = successor
        self._runs[successor] = run
        if self._crumb is not None:
            # Should the engine end now, this is whose request was inside.
            self._crumb.rename(run.slot, *successor[0].names(successor[1]))

    def _pump(self) -> None:
        # Nothing enters a dead engine: the breadcrumb would name it as one that the engine died of.
        while self.inside < self.limit and self._waiting and not self._thread.dead:
            work, row = self._waiting[0]
            if self.inside and work is not self._isolated and (work.isolated or self._isolated is not None):
                return  # What came before it has to be answered first.
            if self.inside and work.isolated and self.inside >= work.isolated:
                return
            member = self._waiting.popleft()
            self._ahead = max(0, self._ahead - 1)
            asked = work.request(row)
            if asked is None:
                continue
            flight = work.flight(row)
            if flight is not None and not self._flights.join(flight, member):
                continue
            self.inside += 1
            self._isolated = work if work.isolated else None
            # Before it is anywhere near the engine.
            slot = self._crumb.enter(*work.names(row)) if self._crumb is not None else -1
            run = self._runs[member] = _Run(member, slot)
            run.task = self._thread.loop.create_task(self._ask(run, asked, work.timeout_s))

    async def _ask(self, run: _Run, asked: tuple[int, bytes], timeout_s: float) -> None:
        try:
            tried = await attempt(self._engine, asked[0], asked[1], timeout_s)
        except EngineDead as exc:
            self._thread.report_death(str(exc))
        except asyncio.CancelledError:
            # Whoever dropped the row has accounted for it.
            pass
        else:
            if not self._thread.dead:
                self._finish(run.member, tried)
        finally:
            self.inside -= 1
            del self._runs[run.member]
            if not self.inside:
                self._isolated = None
            if self._crumb is not None and not self._thread.dead:
                # Of a dead engine all that were inside stay named, whichever hears of its death first.
                self._crumb.leave(run.slot)
            self._pump()
            if self.outstanding < self.limit:
                self._tell()

    def _finish(self, member: tuple[Work, int], tried: Tried) -> None:
        """An answer is also of those who waited; on any other outcome each of them tries for itself.

        Also on a refusal: to say it again costs the engine next to nothing, and what it objects to may be the leader's
        alone.
        """
        waited = self._flights.end(member)
        work, row = member
        work.finish(row, tried)
        if tried.outcome.kind is _OUTPUT:
            for work, row in waited:
                work.finish(row, tried, shared=True)
            return
        for work, row in waited:
            work.alone(row)
        # They came before what is queued now.
        self._waiting.extendleft(reversed(waited))
        self._ahead += len(waited)

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told_at > LOW_EVERY_S:
            self._told_at = now
            self._on_low()


def inside_limit(max_num_seqs: int) -> int:
    """Requests allowed inside the engine at a time."""
    return max_num_seqs * 2 + 8
