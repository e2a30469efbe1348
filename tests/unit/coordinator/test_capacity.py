"""How large chunks and windows are, from what workers say and how long they have a chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.live import WorkerFacts
from common.registry import ModelVersion, Registry
from common.settings import Inference, Scheduler, Settings
from producers.coordinator.capacity import Capacity, capacity
from producers.coordinator.chunk_times import LATEST, ChunkTimes
from producers.coordinator.engine_size import EngineSize

MODEL = "m@1"


def workers(count: int, max_num_seqs: int = 256, chunks_in_flight: int = 3, state: str = "ready") -> list[WorkerFacts]:
    return [
        WorkerFacts(
            node=f"n{n}",
            model=MODEL,
            host="h",
            pid=n,
            device="",
            engine="",
            state=state,
            max_num_seqs=max_num_seqs,
            chunks_in_flight=chunks_in_flight,
        )
        for n in range(count)
    ]


def measured(chunk_s: float | None, rows: int = 256) -> ChunkTimes:
    times = ChunkTimes()
    for _ in range(3 if chunk_s is not None else 0):
        times.add(chunk_s or 0.0, rows)
    return times


def room(count: int, chunk_s: float | None = None, most: int | None = None, queue_size: int = 10**6) -> Capacity:
    return capacity(Scheduler(queue_size=queue_size), workers(count), MODEL, 64, 3, measured(chunk_s), most)


def test_the_window_follows_the_workers_and_how_long_they_have_a_chunk() -> None:
    assert (room(1).target, room(1).window) == (256, 5 * 256)
    assert room(4).window == 4 * room(1).window
    # One long chunk at a time waits for each worker; short ones are taken up before the next could come.
    assert room(2, chunk_s=60.0).window == (6 + 2) * room(2, chunk_s=60.0).target
    assert room(2, chunk_s=2.0).window == (6 + 6) * 256
    assert room(2, chunk_s=0.5).window == (6 + 24) * 256
    assert room(2, chunk_s=0.001, queue_size=16384).window == 16384


def test_chunks_are_no_larger_than_their_message_is_worth() -> None:
    # 256 requests keep a worker of three chunks busy for 0.7 s, for 5, for 20.
    assert room(1, chunk_s=2.0).target == 256
    assert room(1, chunk_s=15.0).target == 141  # What the engine needs to be full while one chunk ends.
    assert room(1, chunk_s=60.0).target == 141
    assert capacity(Scheduler(chunk_requests=1024), workers(1), MODEL, 64, 3, measured(2.0)).target == 384


def test_draining_workers_take_nothing() -> None:
    some = workers(2) + workers(3, state="draining")
    assert capacity(Scheduler(), some, MODEL, 64, 3).slots == 6


def test_a_small_bound_makes_small_chunks_instead_of_idle_workers() -> None:
    small = room(8, most=320)
    assert (small.target, small.window) == (10, 320)
    assert room(4, most=3).target == 1
    assert room(64, queue_size=16384).target == 64
    # What every engine needs to be full, whatever the bound.
    assert room(64, queue_size=16384).wanted == room(64).wanted == 256 * 141


def test_without_a_bound_of_its_own_the_window_is_bounded_by_what_the_workers_run() -> None:
    def found(count: int, seqs: int = 256) -> Capacity:
        return capacity(Scheduler(), workers(count, seqs), MODEL, 64, 3, measured(0.01))

    assert found(0).window == found(1).queue_size == 16_384
    assert found(64).queue_size == 4 * 64 * 256
    assert all(found(n, seqs).wanted <= found(n, seqs).queue_size for n in (29, 64, 200) for seqs in (64, 256))
    assert found(500, 1024).window == 262_144


@given(st.integers(0, 100), st.one_of(st.none(), st.floats(0.001, 1e4)), st.integers(1, 10**5), st.integers(1, 10**5))
def test_the_window_is_bounded_and_holds_a_chunk_for_every_place(
    count: int, chunk_s: float | None, queue_size: int, most: int
) -> None:
    found = capacity(Scheduler(queue_size=queue_size), workers(count), MODEL, 64, 3, measured(chunk_s), most)
    assert 1 <= found.floor <= found.target <= found.window <= min(queue_size, most)
    assert found.window >= min(queue_size, most, found.slots * found.target)


def test_a_model_versions_own_bound_is_shared_by_the_shards() -> None:
    registry = Registry({MODEL: ModelVersion(source="x", max_concurrency=100)}, {}, None)
    settings = Settings(scheduler=Scheduler(shards=3), inference=Inference(batch_size=8))
    assert EngineSize(settings, registry).capacity(MODEL, workers(4)).window == 33
    assert EngineSize(settings, registry).capacity("other@1", workers(4)).window > 33


def test_the_time_of_a_chunk_is_that_of_the_median_row() -> None:
    times = ChunkTimes()
    times.add(9.0, 256)
    times.add(10.0, 256)
    assert times.median is None
    times.add(11.0, 256)
    assert times.median == 10.0
    for _ in range(30):
        times.add(0.1, 4)  # The end of another batch.
    assert times.median == 10.0
    for _ in range(LATEST):
        times.add(3.0, 256)
    assert times.median == pytest.approx(3.0)
