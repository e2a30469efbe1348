"""Chunks through a lane and its engine, each in a thread of its own, as in a worker; no broker."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec

from common.messages import Chunk, Kind, Results, decode_rows
from tests.support.ports import wait_until
from workers import breadcrumb
from workers.abort import Abort
from workers.breadcrumb import Breadcrumb
from workers.cache.key import Space
from workers.cache.memory import Memory
from workers.chunk import ChunkRun, ChunkWork
from workers.engine_thread import EngineThread
from workers.lane import Lane, inside_limit


class LaneFleet:
    """One engine, which is up, and its lane."""

    def __init__(self, thread: EngineThread, crumb: Path, model: str) -> None:
        self.thread = thread
        slots = inside_limit(thread.engine.facts().max_num_seqs)
        self.crumb = Breadcrumb(crumb, node="n", model=model, life="1", slots=slots)
        self.lane = Lane(thread, lambda: None, self.crumb)
        self.space = Space(model, "f")

    def begin(self, chunk: Chunk) -> LaneRun:
        """Run a chunk."""
        return LaneRun(self, chunk)

    def together(self, *chunks: Chunk) -> list[LaneRun]:
        """Begin chunks one after the other, each once the one before is through the queue."""
        runs = []
        for chunk in chunks:
            runs.append(self.begin(chunk))
            wait_until(runs[-1].entered.is_set, 5, "the rows are in the lane")
        return runs

    def inside(self) -> dict[str, list[int]]:
        """What the breadcrumb names: batch → positions."""
        found = breadcrumb.read(self.crumb.path)
        assert found is not None
        return {batch: rows for held in found.chunks for batch, rows in held.inside.items()}


class LaneRun:
    """A chunk that runs; `entered` once the engine was asked for all of it that goes in at once."""

    def __init__(self, fleet: LaneFleet, chunk: Chunk) -> None:
        self.batch = chunk.slices[0].batch
        self.sent: list[Results] = []
        self.reason: Abort | None = None
        self.entered = threading.Event()
        rows = [decode_rows(part.rows) for part in chunk.slices]
        self._number = fleet.crumb.hold(chunk)
        self._crumb = fleet.crumb
        self.work = ChunkWork(chunk, rows, fleet.thread, fleet.lane, self._number)
        memory = Memory(None, fleet.space, chunk, share=True)
        self._run = ChunkRun(chunk, self.work, "node", self.sent.append, memory)
        start, loop = self.work.start, fleet.thread.loop

        def started() -> None:
            start()
            # Two turns later: the tasks that the lane makes of the rows have run, so the engine was asked.
            fleet.thread.call(loop.call_soon, loop.call_soon, self.entered.set)

        self.work.start = started  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()

    def _go(self) -> None:
        self.reason = self._run.run()
        self._crumb.release(self._number)

    def join(self) -> list[tuple[Kind, dict[str, Any]]]:
        """Kind and line of every row, in order, once it has ended."""
        self._thread.join(120)
        assert not self._thread.is_alive()
        found: dict[int, tuple[Kind, dict[str, Any]]] = {}
        for message in self.sent:
            for part in message.parts:
                lines = [msgspec.json.decode(line) for line in part.lines.splitlines()]
                for at, line in enumerate(lines):
                    pos = int.from_bytes(part.pos[4 * at : 4 * at + 4], "little")
                    assert pos not in found
                    found[pos] = Kind(part.kind[at]), line
        return [found[pos] for pos in sorted(found)]

    def shared(self) -> list[bool]:
        """For every row, whether its answer is another one's."""
        return [line["batchmill"].get("shared", False) for _, line in self.join()]
