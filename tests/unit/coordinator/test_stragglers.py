"""Second copies of what a slow worker keeps at the end: who gets them, and that a row counts once whoever answers."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import Kind
from producers.coordinator import losses, stragglers
from producers.coordinator.packing import Draft, Wait
from producers.coordinator.records import Cancelled, Paused
from tests.support.coordinators import MODEL
from tests.unit.coordinator.test_book import Bench, all_of, batch_of, judged

NODES = ["slow", "fast", "other"]


def find(bench: Bench, nodes: list[str] | None = None, factor: float = 2.0, floor: int = 2) -> Draft | None:
    return stragglers.find(bench.book, bench.lane, nodes or NODES, factor, floor, bench.now, bench.now)


def copy(bench: Bench, drafted: Draft) -> str:
    return bench.send_picks(drafted.picks, drafted.node, drafted.copy_of)


def tail(planned: int = 8) -> tuple[Bench, str]:
    """A batch whose last chunk straggles: chunks take 10 s, this one is held by `slow` for 30."""
    bench = Bench(batch_of("a", planned))
    for _ in range(3):
        bench.lane.times.add(10.0, 8)
    chunk = str(bench.send())
    losses.see_leases(bench.book, {chunk: "slow"}, bench.now)
    bench.now += 30
    losses.see_leases(bench.book, {chunk: "slow"}, bench.now)
    bench.answer(chunk, all_of(Kind.OUTPUT, [0, 1]))
    return bench, chunk


def test_what_is_missing_goes_to_idle_workers_in_equal_parts_each_row_once() -> None:
    bench, chunk = tail()
    first = find(bench)
    assert first is not None
    assert (first.node, first.copy_of, first.picks[0].positions.tolist()) == ("fast", chunk, [2, 3, 4])
    used = bench.book.window_used(bench.lane)
    one = copy(bench, first)
    second = find(bench)
    assert second is not None
    assert (second.node, second.picks[0].positions.tolist()) == ("other", [5, 6, 7])
    two = copy(bench, second)
    assert find(bench) is None
    assert bench.book.window_used(bench.lane) == used
    assert [bench.book.out[c].shares[0].attempt for c in (chunk, one, two)] == [1, 1, 1]


def test_only_at_the_very_end_and_only_what_runs_far_longer_than_chunks_do() -> None:
    bench, chunk = tail()
    assert find(bench, factor=0) is None
    assert find(bench, factor=4.0) is None
    assert find(bench, nodes=["slow"]) is None
    losses.see_leases(bench.book, {chunk: None}, bench.now)
    assert find(bench) is None  # Nobody holds it: that is for losses to judge.
    bench, _ = tail(16)
    drafted = bench.draft()
    assert isinstance(drafted, Draft)  # There is something fresh to send.
    waiting = str(bench.send())
    assert find(bench) is None  # It waits in the queue: whoever is idle takes it.
    losses.see_leases(bench.book, {waiting: "fast"}, bench.now)
    found = find(bench)
    assert found is not None
    assert found.node == "other"  # The other one has something to do.
    left = bench.draft()
    assert isinstance(left, Wait)
    assert left.idle


def test_a_chunk_that_moved_to_another_worker_begins_anew() -> None:
    bench, chunk = tail()
    losses.see_leases(bench.book, {chunk: "fast"}, bench.now)
    assert find(bench) is None


def test_paused_and_cancelled_batches_get_no_copies() -> None:
    for decision in (Paused("a", 0.0), Cancelled("a", 8, 0.0)):
        bench, _ = tail()
        bench.decide(decision)
        assert find(bench) is None


def test_the_first_answer_wins_and_the_others_work_is_ended() -> None:
    bench, chunk = tail()
    found = find(bench, nodes=["slow", "fast"])
    assert found is not None
    second = copy(bench, found)
    bench.answer(second, all_of(Kind.OUTPUT, [2, 3, 4, 5, 6, 7]), done=True, node="fast")
    assert bench.book.out == {}
    assert list(bench.book.given_up) == [chunk]
    progress = bench.book.batches["a"]
    assert progress.complete
    # The slow one answers after all.
    bench.answer(chunk, all_of(Kind.OUTPUT, [2, 3]) | all_of(Kind.RETRY, [4]), done=True, seq=1)
    assert (progress.duplicates, bench.lane.retries) == (3, [])


def test_the_original_may_win_too() -> None:
    bench, chunk = tail()
    found = find(bench, nodes=["slow", "fast"])
    assert found is not None
    second = copy(bench, found)
    bench.answer(chunk, all_of(Kind.OUTPUT, [2, 3, 4, 5, 6, 7]), done=True, seq=1)
    assert bench.book.out == {}
    assert list(bench.book.given_up) == [second]


def test_a_loss_or_a_failure_of_one_sends_nothing_while_the_other_lives() -> None:
    bench, chunk = tail()
    found = find(bench, nodes=["slow", "fast"])
    assert found is not None
    second = copy(bench, found)
    bench.answer(second, {2: Kind.RETRY, 3: Kind.OUTPUT}, node="fast")
    bench.lose(second, leased=False)
    assert bench.lane.retries == []
    bench.lose(chunk, leased=False)
    assert [r.positions.tolist() for r in bench.lane.retries] == [[2, 4, 5, 6, 7]]


def test_a_copy_for_a_worker_that_is_gone_is_lost_and_another_is_made() -> None:
    bench, chunk = tail()
    found = find(bench, nodes=["slow", "fast"])
    assert found is not None
    second = copy(bench, found)
    losses.see_workers(bench.book, {"slow", "other"}, bench.now)
    bench.now += 60
    losses.see_leases(bench.book, {chunk: "slow"}, bench.now)
    verdict = judged(bench)[0]
    assert verdict.chunk == second
    bench.lose(second, leased=False)
    again = find(bench, nodes=["slow", "other"])
    assert again is not None
    assert (again.node, again.picks[0].positions.tolist()) == ("other", [2, 3, 4, 5, 6, 7])


def test_attempts_that_fail_in_both_are_one_attempt() -> None:
    bench, chunk = tail()
    found = find(bench, nodes=["slow", "fast"])
    assert found is not None
    second = copy(bench, found)
    bench.answer(second, all_of(Kind.RETRY, [2, 3]), node="fast")
    bench.answer(chunk, all_of(Kind.RETRY, [2, 3]), seq=1)
    assert [(r.positions.tolist(), r.attempt) for r in bench.lane.retries] == [([2, 3], 2)]


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_whatever_becomes_of_copies_no_row_is_forgotten_and_the_log_says_the_same(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(batch_of("a", 30), batch_of("b", 5))
    for _ in range(3):
        bench.lane.times.add(1.0, 8)
    for _ in range(rng.randint(1, 50)):
        bench.now += rng.choice([0.1, 3.0])
        losses.see_leases(bench.book, {c: rng.choice(NODES) for c in bench.book.out if rng.random() < 0.5}, bench.now)
        act = rng.random()
        chunk = rng.choice(list(bench.book.out)) if bench.book.out else None
        if act < 0.3 or chunk is None:
            bench.send()
        elif act < 0.6:
            drafted = find(bench, nodes=[*NODES, "n4", "n5"])
            if drafted is not None:
                copy(bench, drafted)
        elif act < 0.85:
            share = rng.choice(bench.book.out[chunk].shares)
            rows = {p: Kind(rng.choice([1, 1, 2, 3])) for p in share.positions.tolist() if rng.random() < 0.5}
            bench.answer(chunk, rows, batch=share.batch, done=rng.random() < 0.5, seq=rng.randint(0, 1))
        else:
            bench.lose(chunk, leased=rng.random() < 0.3)
    for book in (bench.book, bench.replay()):
        lane = book.lane(MODEL)
        for name, progress in book.batches.items():
            held = [p for c in book.out.values() for s in c.shares if s.batch == name for p in s.positions.tolist()]
            again = [p for r in lane.retries if r.batch == name for p in r.positions.tolist()]
            open_ = progress.rows.open_rows(np.arange(progress.next_pos, dtype=np.uint32)).tolist()
            assert set(open_) <= set(held) | set(again)
            assert len(again) == len(set(again))
            assert not set(again) & set(held) & set(open_)
    assert list(bench.replay().out) == list(bench.book.out)


@pytest.mark.parametrize(("count", "median"), [(2, None), (3, 10.0)])
def test_nothing_is_slow_before_it_is_known_how_long_chunks_take(count: int, median: float | None) -> None:
    bench = Bench(batch_of("a", 8))
    for _ in range(count):
        bench.lane.times.add(10.0, 8)
    assert bench.lane.times.median == median
    chunk = str(bench.send())
    losses.see_leases(bench.book, {chunk: "slow"}, bench.now)
    bench.now += 30
    assert (find(bench) is not None) == (median is not None)
