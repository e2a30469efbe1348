"""Equal determined requests on their way through the lane: computed once, and nobody suffers for another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.messages import Chunk, Kind
from common.registry import ModelVersion
from common.settings import Settings
from tests.support.chunks import chat, make_chunk
from tests.support.lane_runs import LaneFleet
from tests.support.ports import wait_until
from workers import attempt
from workers.abort import Abort
from workers.engine import echo
from workers.engine.base import Answer
from workers.engine_thread import EngineThread

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


class Fleet(LaneFleet):
    """The lane of an engine that holds its answers back."""

    def __init__(self, crumb: Path, statuses: list[int]) -> None:
        self.engine = Held(statuses)
        thread = EngineThread(lambda: self.engine, lambda _: None)
        thread.start()
        super().__init__(thread, crumb, MODEL)

    def release(self) -> None:
        self.thread.call(self.engine.go.set)


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


def test_a_refusal_is_the_leaders_alone(start_fleet: StartFleet) -> None:
    fleet = start_fleet(400)
    first, second = fleet.together(equal(2), equal(1))
    fleet.release()
    assert [kind for kind, _ in first.join()] == [Kind.ERROR, Kind.OUTPUT]
    assert [kind for kind, _ in second.join()] == [Kind.OUTPUT]
    assert fleet.engine.asked == 3


def test_a_timeout_is_the_leaders_alone(start_fleet: StartFleet) -> None:
    fleet = start_fleet()
    [run] = fleet.together(equal(2, timeout_s=0.2))
    assert {(kind, line["error"]["code"]) for kind, line in run.join()} == {(Kind.RETRY, "timeout")}
    assert fleet.engine.asked == 2
