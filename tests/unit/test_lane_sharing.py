"""Equal determined requests on their way through the lane: computed once, and nobody suffers for another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.messages import Chunk, Kind, Results, decode_rows
from common.registry import ModelVersion
from common.settings import Settings
from tests.support.chunks import chat, make_chunk
from tests.support.ports import wait_until
from workers import attempt, breadcrumb
from workers.abort import Abort
from workers.breadcrumb import Breadcrumb
from workers.cache.key import Space
from workers.cache.memory import Memory
from workers.chunk import ChunkRun, ChunkWork
from workers.engine import echo
from workers.engine.base import Answer
from workers.engine_thread import EngineThread
from workers.lane import Lane, inside_limit

MODEL = "m@1"


class Held(echo.EchoEngine):
    """Counts what it is asked and answers once it may; with a script of statuses, by these first."""

    def __init__(self, statuses: list[int]) -> None:
        super().__init__(MODEL, ModelVersion(source="none", engine={"max_num_seqs": 4}), Settings(), {})
        self.go = asyncio.Event()
        self.asked = 0
        self.aborted = 0
        self._statuses = statuses

    async def infer(self, url: str, body: bytes) -> Answer:
        self.asked += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        answer = await super().infer(url, body)
        return Answer(self._statuses.pop(0), b'{"error":{"message":"no"}}') if self._statuses else answer


class Fleet:
    """One engine and its lane; chunks run in threads of their own."""

    def __init__(self, crumb: Path, statuses: list[int]) -> None:
        self.engine = Held(statuses)
        self.thread = EngineThread(lambda: self.engine, lambda _: None)
        self.thread.start()
        self.crumb = Breadcrumb(crumb, node="n", model=MODEL, life="1", slots=inside_limit(4))
        self.lane = Lane(self.thread, lambda: None, self.crumb)
        self.space = Space(MODEL, "f")

    def begin(self, chunk: Chunk) -> Run:
        return Run(self, chunk)

    def together(self, *chunks: Chunk) -> list[Run]:
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

    def release(self) -> None:
        self.thread.call(self.engine.go.set)


class Run:
    """A chunk that runs."""

    def __init__(self, fleet: Fleet, chunk: Chunk) -> None:
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
        """Kind and line of every row, in order."""
        self._thread.join(60)
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
        return [line["batchmill"].get("shared", False) for _, line in self.join()]


StartFleet = Callable[..., Fleet]


@pytest.fixture
def start_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartFleet]:
    monkeypatch.setattr(attempt, "AGAIN", 0)
    fleets: list[Fleet] = []

    def start(*statuses: int) -> Fleet:
        fleets.append(Fleet(tmp_path / "crumb", list(statuses)))
        return fleets[-1]

    yield start
    for fleet in fleets:
        assert fleet.thread.stop(60)


def equal(count: int, *, temperature: float = 0.0, mode: str = "on", **fields: Any) -> Chunk:
    return make_chunk([chat("same", temperature=temperature)] * count, MODEL, cache=mode, **fields)


def test_equal_requests_of_all_chunks_are_computed_once(start_fleet: StartFleet) -> None:
    fleet = start_fleet()
    runs = fleet.together(equal(3), equal(2))
    assert (fleet.engine.asked, fleet.lane.inside, fleet.lane.outstanding) == (1, 1, 1)
    assert fleet.inside() == {runs[0].batch: [0]}, "only what is inside can be blamed"
    fleet.release()
    assert [run.shared() for run in runs] == [[False, True, True], [True, True]]
    bodies = {msgspec.json.encode(line["response"]["body"]) for run in runs for _, line in run.join()}
    assert len(bodies) == 1
    assert [sum(p.usage.shared for m in run.sent for p in m.parts) for run in runs] == [2, 2]
    assert fleet.engine.asked == 1
    assert fleet.inside() == {}


def test_those_that_wait_leave_the_engine_to_others(start_fleet: StartFleet) -> None:
    fleet = start_fleet()
    others = make_chunk([chat(f"other {n}", temperature=0) for n in range(5)], MODEL)
    runs = fleet.together(equal(50), others)
    assert fleet.engine.asked == 6
    assert fleet.lane.outstanding == 6 < fleet.lane.limit, "more chunks are wanted"
    fleet.release()
    assert [len(run.join()) for run in runs] == [50, 5]


def test_sampled_requests_are_each_sampled(start_fleet: StartFleet) -> None:
    fleet = start_fleet()
    [run] = fleet.together(equal(4, temperature=1.0))
    fleet.release()
    assert run.shared() == [False] * 4
    assert fleet.engine.asked == 4


def test_batches_that_do_not_read_the_cache_share_within_themselves(start_fleet: StartFleet) -> None:
    fleet = start_fleet()
    runs = fleet.together(equal(2, mode="off"), equal(2, mode="write"), equal(2, mode="on"))
    assert fleet.engine.asked == 3
    fleet.release()
    assert [run.shared() for run in runs] == [[False, True]] * 3


def test_a_leader_that_is_given_up_hands_over(start_fleet: StartFleet) -> None:
    fleet = start_fleet()
    first, second = fleet.together(equal(2), equal(2))
    first.work.abort(Abort.DRAIN)
    assert first.join() == []
    assert fleet.inside() == {second.batch: [0]}, "whose it is now"
    assert (fleet.engine.asked, fleet.engine.aborted) == (1, 0)
    fleet.release()
    assert second.shared() == [False, True]
    assert fleet.engine.asked == 1


def test_what_nobody_waits_for_is_aborted(start_fleet: StartFleet) -> None:
    fleet = start_fleet()
    runs = fleet.together(equal(2), equal(2))
    runs[1].work.forget({runs[1].batch})
    assert runs[1].join() == []
    assert fleet.engine.aborted == 0
    runs[0].work.abort(Abort.USER)
    assert runs[0].join() == []
    wait_until(lambda: fleet.lane.inside == 0, 5, "the engine is empty")
    assert (fleet.engine.asked, fleet.engine.aborted) == (1, 1)
    assert fleet.inside() == {}


def test_a_failure_is_the_leaders_alone(start_fleet: StartFleet) -> None:
    fleet = start_fleet(500)
    first, second = fleet.together(equal(2), equal(1))
    fleet.release()
    assert [kind for kind, _ in first.join()] == [Kind.RETRY, Kind.OUTPUT]
    assert [kind for kind, _ in second.join()] == [Kind.OUTPUT]
    assert first.shared() + second.shared() == [False] * 3
    assert fleet.engine.asked == 3


def test_a_refusal_is_one_for_all(start_fleet: StartFleet) -> None:
    fleet = start_fleet(400)
    [run] = fleet.together(equal(3))
    fleet.release()
    assert [kind for kind, _ in run.join()] == [Kind.ERROR] * 3
    assert run.shared() == [False, True, True]
    assert fleet.engine.asked == 1


def test_a_timeout_is_the_leaders_alone(start_fleet: StartFleet) -> None:
    fleet = start_fleet()
    [run] = fleet.together(equal(2, timeout_s=0.2))
    assert {(kind, line["error"]["code"]) for kind, line in run.join()} == {(Kind.RETRY, "timeout")}
    assert fleet.engine.asked == 2
