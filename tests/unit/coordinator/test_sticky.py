"""Groups that share a prefix: cut at their borders, kept with one worker, and nothing lost or sent twice for it."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import sticky as bench_sticky
from common.messages import Kind
from producers.coordinator import sticky
from producers.coordinator.capacity import Capacity
from producers.coordinator.packing import Wait
from producers.coordinator.progress import Stretch
from tests.unit.coordinator.test_book import Bench, all_of, batch_of

NODES = ("n0", "n1", "n2")
ROOM = Capacity(target=8, window=72, workers=3, slots=9, floor=2, nodes=NODES, seqs=8)
FAR = 4 * sticky.WORTH


def shared_of(groups: list[int]) -> np.ndarray:
    """What the plan says of rows in groups of these sizes."""
    found = np.full(sum(groups), FAR, dtype=np.int64)
    found[np.cumsum([0, *groups])[:-1]] = 0
    return found


def send(bench: Bench, shared: np.ndarray, room: Capacity = ROOM, sticks: bool = True) -> str | Wait:
    drafted = bench.draft(room)
    if isinstance(drafted, Wait):
        return drafted
    seen = sticky.view(bench.book, bench.lane, drafted, room, sticks)
    if seen is not None:
        drafted = sticky.route(drafted, seen, lambda start, end: shared[start:end])
    return bench.send_picks(drafted.picks, drafted.node)


@pytest.mark.parametrize(
    ("after", "count"),
    [
        ([0] * 8, 8),  # Nothing is shared: all of them.
        ([9] * 7 + [0], 8),
        ([9] * 5 + [0] + [9] * 2, 6),
        ([9] * 6 + [3, 9], 7),  # Where least is shared.
        ([9] * 4 + [0] + [9] * 3, 8),  # That border is too near.
        ([9], 1),
    ],
)
def test_chunks_are_cut_where_least_is_shared(after: list[int], count: int) -> None:
    assert sticky.cut(np.array(after)) == count


def test_each_group_stays_with_one_worker() -> None:
    bench = Bench(batch_of("a", 24 * 30))
    shared = shared_of([24] * 30)
    homes: dict[int, Counter[str]] = {}
    # Until the end of the work, when whoever has nothing to do takes what is left.
    while bench.book.batches["a"].unsent >= ROOM.slots * ROOM.target:
        chunk = send(bench, shared)
        if isinstance(chunk, Wait):
            # Whoever has been at it longest ends a chunk.
            first = next(iter(bench.book.out))
            bench.answer(first, all_of(Kind.OUTPUT, bench.positions(first)), done=True)
            continue
        rows = bench.positions(chunk)
        assert len({row // 24 for row in rows}) == 1, "chunks end where groups do"
        homes.setdefault(rows[0] // 24, Counter())[bench.book.out[chunk].target] += len(rows)
    assert all(len(counts) == 1 for counts in homes.values())
    assert {node for counts in homes.values() for node in counts} == set(NODES)


def test_small_groups_and_a_single_worker_need_no_queue_of_their_own() -> None:
    bench = Bench(batch_of("a", 48))
    chunk = str(send(bench, shared_of([4] * 12)))
    assert bench.book.out[chunk].target == ""
    for common, own in ((1023, False), (1024, True)):
        bench = Bench(batch_of("a", 720))
        chunk = str(send(bench, np.minimum(shared_of([720]), common)))
        assert bool(bench.book.out[chunk].target) is own, "less is computed again as fast as sent"
    alone = Capacity(target=8, window=72, workers=1, slots=3, floor=2, nodes=NODES[:1], seqs=8)
    bench = Bench(batch_of("a", 48))
    assert bench.book.out[str(send(bench, shared_of([48]), alone))].target == ""
    bench = Bench(batch_of("a", 48))
    assert bench.book.out[str(send(bench, shared_of([48]), sticks=False))].target == ""


def test_what_was_left_to_a_worker_that_is_gone_goes_to_another() -> None:
    bench = Bench(batch_of("a", 200))
    shared = shared_of([20] * 10)
    for _ in range(4):
        send(bench, shared)
    progress = bench.book.batches["a"]
    gone = progress.skipped[0].home
    rest = tuple(n for n in NODES if n != gone)
    chunk = str(send(bench, shared, Capacity(8, 72, 2, 6, 2, rest, seqs=8)))
    assert bench.positions(chunk)[0] < progress.next_pos - 8
    assert bench.book.out[chunk].target in rest


@given(st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_every_row_goes_out_once_and_the_log_tells_the_same(seed: int) -> None:
    rng = random.Random(seed)
    groups = [rng.randint(1, 40) for _ in range(rng.randint(1, 8))]
    shared = shared_of(groups)
    bench = Bench(batch_of("a", sum(groups)))
    progress = bench.book.batches["a"]
    sent: list[int] = []
    while len(sent) < sum(groups):
        if rng.random() < 0.6:
            nodes = tuple(rng.sample(NODES, rng.randint(0, 3)))
            room = Capacity(8, 72, max(1, len(nodes)), 3 * max(1, len(nodes)), 2, nodes, seqs=8)
            chunk = send(bench, shared, room, rng.random() < 0.9)
            if not isinstance(chunk, Wait):
                rows = bench.positions(chunk)
                assert 1 <= len(rows) <= 8
                sent += rows
        elif bench.book.out:
            chunk = rng.choice(list(bench.book.out))
            bench.answer(chunk, all_of(Kind.OUTPUT, bench.positions(chunk)), done=True, node=rng.choice(NODES))
        assert progress.outstanding == sum(len(s.positions) for c in bench.book.out.values() for s in c.shares)
        assert progress.unsent == sum(groups) - len(sent)
        assert len(progress.skipped) <= len(NODES) + 1
    assert sorted(sent) == list(range(sum(groups)))
    assert progress.resent == 0
    cut = rng.randint(0, len(bench.log))
    del bench.log[cut:]
    again = bench.replay().batches["a"]
    known = {p for s in [again.ahead, *again.skipped] for p in range(s.start, s.end)}
    assert known == set(range(sum(groups))) - set(_sent(bench))


def _sent(bench: Bench) -> list[int]:
    return [p for record in bench.log for piece in getattr(record, "slices", []) for p in piece.positions().tolist()]


def test_what_waits_for_a_busy_worker_is_taken_for_an_idle_one() -> None:
    bench = Bench(batch_of("a", 48))
    shared = shared_of([48])
    room = Capacity(target=8, window=72, workers=2, slots=6, floor=2, nodes=("slow", "quick"), seqs=2)
    chunks = [bench.send_picks(bench.draft(room).picks, "slow") for _ in range(5)]  # type: ignore[union-attr]
    last = str(send(bench, shared, room, sticks=False))
    for chunk in bench.book.out.values():
        chunk.published = True
    for taken in (chunks[0], last):
        bench.book.out[taken].leased_at = bench.now
    bench.book.out[last].node = "quick"

    def stolen(idle: tuple[str, ...] = ("slow", "quick"), after: float = 5.0) -> str | None:
        return sticky.steal(bench.book, bench.lane, room, idle, bench.now + after)

    assert stolen() is None, "the quick one has something to do"
    bench.answer(last, all_of(Kind.OUTPUT, bench.positions(last)), done=True, node="quick")
    assert stolen(after=0.5) is None, "it may be taken by now"
    assert stolen(("slow",)) is None, "another shard keeps the quick one busy"
    assert stolen() == chunks[4]
    bench.lose(chunks[4], leased=False)
    assert chunks[4] in bench.book.given_up
    again = bench.draft(room)
    assert not isinstance(again, Wait)
    assert (again.node, again.picks[0].attempt) == ("", 1)
    bench.send_picks(again.picks)
    assert stolen() is None, "what is in the shared queue goes first"


def test_a_stretch_that_is_answered_is_passed() -> None:
    bench = Bench(batch_of("a", 64))
    progress = bench.book.batches["a"]
    assert progress.goes_out(np.arange(16, 24, dtype=np.uint32), "n1") == 0
    assert progress.skipped == [Stretch(0, 16, "")]
    progress.rows.merge(np.arange(10, dtype=np.uint32), np.full(10, Kind.OUTPUT, np.uint8))
    assert progress.pass_answered()
    assert progress.skipped == [Stretch(10, 16, "")]
    assert progress.goes_out(np.arange(10, 13, dtype=np.uint32), "n2") == 0
    assert progress.skipped == [Stretch(13, 16, "n2")]
    assert progress.unsent == 43


def test_a_fleet_computes_fewer_prompts_and_is_no_slower() -> None:
    without, found = (bench_sticky.run(4, 40, sticky=sticks) for sticks in (False, True))
    assert found["computed_tokens"] < 1.1 * found["least_tokens"]
    assert without["computed_tokens"] > 1.2 * without["least_tokens"]
    assert found["makespan_s"] < 1.02 * without["makespan_s"]
    slow, found = (bench_sticky.run(4, 20, sticky=sticks, slow=0.02) for sticks in (False, True))
    assert found["makespan_s"] < 1.05 * slow["makespan_s"]
