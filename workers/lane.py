"""The queue before the engine: requests of all chunks, first come first served, a bounded number inside at a time.

Twice `max_num_seqs` inside keeps the engine's own batch full from one step to the next; more would only wait in there,
where its time already counts against the request's timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from workers.attempt import Tried, attempt
from workers.breadcrumb import Breadcrumb
from workers.engine.base import Engine, EngineDead
from workers.engine_thread import EngineThread

#: Seconds between two calls of `on_low`, at least.
LOW_EVERY_S = 0.02


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

    def finish(self, row: int, tried: Tried) -> None:
        """Take the outcome of a row."""
        ...

    def names(self, row: int) -> tuple[int, bytes, int]:
        """For the breadcrumb: the chunk's number there, the batch's id, and the row's position."""
        ...


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
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        #: Requests that are in the engine.
        self.inside = 0

    @property
    def outstanding(self) -> int:
        """Requests inside the engine or before it; enough of them while a request keeps the others out."""
        count = self.inside + len(self._waiting)
        return max(count, self.limit) if self.isolating else count

    @property
    def isolating(self) -> bool:
        """True while an isolated request is inside, or next."""
        return self._isolated is not None or (bool(self._waiting) and self._waiting[0][0].isolated > 0)

    def enter(self, work: Work, rows: range) -> None:
        """Queue rows behind all that are here, or before them."""
        if work.ahead:
            self._waiting.extendleft((work, row) for row in reversed(rows))
        else:
            self._waiting.extend((work, row) for row in rows)
        self._pump()

    def drop(self, work: Work, row: int) -> None:
        """Abort a row inside the engine; one that still waits is passed over, since `request` says None by then."""
        task = self._tasks.get((id(work), row))
        if task is not None:
            task.cancel()

    def _pump(self) -> None:
        while self.inside < self.limit and self._waiting:
            work, row = self._waiting[0]
            if self.inside and work is not self._isolated and (work.isolated or self._isolated is not None):
                return  # What came before it has to be answered first.
            if self.inside and work.isolated and self.inside >= work.isolated:
                return
            self._waiting.popleft()
            asked = work.request(row)
            if asked is None:
                continue
            self.inside += 1
            self._isolated = work if work.isolated else None
            # Before it is anywhere near the engine.
            slot = self._crumb.enter(*work.names(row)) if self._crumb is not None else -1
            key = id(work), row
            self._tasks[key] = self._thread.loop.create_task(self._ask(work, row, asked, key, slot))

    async def _ask(self, work: Work, row: int, asked: tuple[int, bytes], key: tuple[int, int], slot: int) -> None:
        try:
            tried = await attempt(self._engine, asked[0], asked[1], work.timeout_s)
        except EngineDead as exc:
            self._thread.report_death(str(exc))
        except asyncio.CancelledError:
            # Whoever dropped the row has accounted for it.
            pass
        else:
            if not self._thread.dead:
                work.finish(row, tried)
        finally:
            self.inside -= 1
            del self._tasks[key]
            if not self.inside:
                self._isolated = None
            if self._crumb is not None and not self._thread.dead:
                # Of a dead engine all that were inside stay named, whichever hears of its death first.
                self._crumb.leave(slot)
            self._pump()
            if self.outstanding < self.limit:
                self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told_at > LOW_EVERY_S:
            self._told_at = now
            self._on_low()


def inside_limit(max_num_seqs: int) -> int:
    """Requests allowed inside the engine at a time."""
    return max_num_seqs * 2 + 8
