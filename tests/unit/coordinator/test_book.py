"""The book: its decisions one by one, and that reading the log again gives the same book."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import TOO_LATE, VERSION, Crash, Failure, Inside, Kind, Part, Results, infer_queue, node_queue
from common.plan import Window
from common.settings import Scheduler
from producers.batch import Batch, Input
from producers.coordinator import losses, packing
from producers.coordinator.book import Book
from producers.coordinator.capacity import Capacity
from producers.coordinator.packing import Draft, Pick, Wait
from producers.coordinator.records import (
    Cancelled,
    Closed,
    Dispatch,
    Expired,
    Lost,
    Paused,
    Reprioritised,
    Resumed,
    pack_positions,
    sent_slice,
    unpack_positions,
)
from producers.coordinator.weights import Weights
from tests.support.coordinators import MODEL, part_of

WEIGHTS = Weights(Scheduler())
QUEUE = infer_queue(MODEL)
ROOM = Capacity(target=8, window=40, workers=1, slots=3, floor=2)


def batch_of(name: str, planned: int, model: str = MODEL, timeout_s: float = 600.0) -> Batch:
    return Batch(
        id=name,
        model=model,
        created_at=0.0,
        shard=0,
        input=Input("x", 0, ""),
        requests=planned,
        planned=planned,
        invalid=0,
        cost=0,
        windows=[Window(0, planned, 0, planned)],
        timeout_s=timeout_s,
    )


class Bench:
    """A book with a clock and a log."""

    def __init__(self, *batches: Batch) -> None:
        self.book = Book()
        self.batches = batches
        for batch in batches:
            self.book.open(batch)
        self.now = 100.0
        self.log: list[Any] = []
        self.numbers = 0

    @property
    def lane(self) -> Any:
        return self.book.lane(MODEL)

    def send(self, room: Capacity = ROOM, wait_s: float = 0.0) -> str | Wait:
        drafted = self.draft(room, wait_s)
        if isinstance(drafted, Wait):
            return drafted
        return self.send_picks(drafted.picks, drafted.node)

    def draft(self, room: Capacity = ROOM, wait_s: float = 0.0) -> Draft | Wait:
        return packing.draft(self.book, self.lane, room, self.now, self.now, wait_s, WEIGHTS)

    def send_picks(self, picks: list[Pick], node: str = "", copy_of: str = "") -> str:
        self.numbers += 1
        record = Dispatch(
            f"c{self.numbers}",
            MODEL,
            self.now,
            [sent_slice(p.batch, p.positions, p.attempt, p.charges, p.lapses, p.tried, p.cost) for p in picks],
            node,
            copy_of,
        )
        self.log.append(record)
        again = [(p.retry, p.positions) for p in picks if p.retry is not None]
        chunk = self.book.sent(record, self.now, again)
        packing.charge(self.book, self.lane, [p._replace(cost=100 * len(p.positions)) for p in picks], chunk)
        return record.chunk

    def positions(self, chunk: str, batch: str = "a") -> list[int]:
        shares = self.book.out[chunk].shares
        return sorted(int(p) for s in shares if s.batch == batch for p in s.positions)

    def answer(
        self, chunk: str, rows: dict[int, Kind], *, batch: str = "a", done: bool = False, seq: int = 0,
        failure: Failure | None = None, node: str = "n",
    ) -> None:  # fmt: skip
        parts: list[Part] = [part_of(batch, [(p, k, b"{}\n") for p, k in rows.items()])] if rows else []
        self.take(chunk, parts, done=done, seq=seq, failure=failure, node=node)

    def take(
        self, chunk: str, parts: list[Part], *, done: bool = False, seq: int = 0, failure: Failure | None = None,
        node: str = "n",
    ) -> None:  # fmt: skip
        record = Results(VERSION, chunk, MODEL, node, seq, done, parts, failure)
        self.log.append(record)
        self.book.results(record, len(self.log), self.now)

    def lose(self, chunk: str, *, leased: bool) -> None:
        record = Lost(chunk, leased)
        self.log.append(record)
        self.book.lost(record, self.now)

    def crash(self, chunk: str, inside: dict[str, list[int]], life: str = "1", node: str = "n") -> None:
        named = [Inside(b, pack_positions(np.array(p, dtype=np.uint32))) for b, p in inside.items()]
        record = Results(VERSION, chunk, MODEL, node, 0, False, [], crash=Crash(life, "signal 9", named))
        self.log.append(record)
        self.book.results(record, len(self.log), self.now)

    def decide(self, decision: Any) -> None:
        self.log.append(decision)
        self.book.decided(decision, len(self.log))

    def replay(self) -> Book:
        book = Book()
        for batch in self.batches:
            book.open(batch)
        for place, record in enumerate(self.log, 1):
            if isinstance(record, Dispatch):
                book.sent(record, 0.0)
            elif isinstance(record, Results):
                book.results(record, place, 0.0)
            elif isinstance(record, Lost):
                book.lost(record, 0.0)
            else:
                book.decided(record, place)
        return book


def all_of(kind: Kind, positions: list[int]) -> dict[int, Kind]:
    return dict.fromkeys(positions, kind)


def test_a_batch_is_sent_in_order_in_full_chunks() -> None:
    bench = Bench(batch_of("a", 20))
    assert [bench.positions(str(bench.send())) for _ in range(3)] == [
        list(range(8)),
        list(range(8, 16)),
        list(range(16, 20)),
    ]
    assert isinstance(bench.send(), Wait)


def test_the_window_counts_what_is_sent_and_not_settled() -> None:
    bench = Bench(batch_of("a", 1000))
    chunks = []
    while isinstance(sent := bench.send(), str):
        chunks.append(sent)
    assert len(chunks) == 5
    assert bench.book.window_used(bench.lane) == 40
    # Room for less than a chunk is not used: what comes back makes room for a whole one.
    bench.answer(chunks[0], all_of(Kind.OUTPUT, [0, 1, 2]))
    assert isinstance(bench.send(), Wait)
    bench.answer(chunks[0], all_of(Kind.OUTPUT, [3, 4, 5, 6, 7]), done=True, seq=1)
    assert bench.positions(str(bench.send())) == list(range(40, 48))


def test_failed_attempts_count_in_the_window_so_that_memory_is_bounded() -> None:
    bench = Bench(batch_of("a", 1000))
    for _ in range(5):
        chunk = str(bench.send())
        bench.answer(chunk, all_of(Kind.RETRY, bench.positions(chunk)), done=True)
    assert isinstance(bench.send(), Wait)
    assert sum(len(r.positions) for r in bench.lane.retries) == 40


def test_small_batches_share_a_chunk_and_take_turns() -> None:
    bench = Bench(batch_of("a", 3), batch_of("b", 3), batch_of("c", 20))
    first = str(bench.send())
    assert [bench.positions(first, b) for b in "abc"] == [[0, 1, 2], [0, 1, 2], [0, 1]]
    assert bench.positions(str(bench.send()), "c") == list(range(2, 10))


def test_large_batches_alternate() -> None:
    bench = Bench(batch_of("a", 100), batch_of("b", 100))
    order = [bench.book.out[str(bench.send())].shares[0].batch for _ in range(4)]
    assert order == ["a", "b", "a", "b"]


def test_batches_with_other_time_limits_do_not_share_a_chunk() -> None:
    bench = Bench(batch_of("a", 3), batch_of("b", 3, timeout_s=5.0))
    assert [s.batch for s in bench.book.out[str(bench.send())].shares] == ["a"]
    assert [s.batch for s in bench.book.out[str(bench.send())].shares] == ["b"]


def test_a_partial_chunk_waits_for_more() -> None:
    bench = Bench(batch_of("a", 3), batch_of("b", 3, timeout_s=5.0))
    # Not while workers have nothing else to do.
    assert bench.positions(str(bench.send(wait_s=0.05))) == [0, 1, 2]
    waiting = bench.send(wait_s=0.05)
    assert isinstance(waiting, Wait)
    assert waiting.until == pytest.approx(100.05)
    bench.now = 100.06
    assert bench.positions(str(bench.send(wait_s=0.05)), "b") == [0, 1, 2]


@pytest.mark.parametrize(("workers", "sizes"), [(1, [8, 8, 4]), (2, [4, 3, 3, 2, 2, 2, 2, 2])])
def test_chunks_shrink_only_at_the_end_and_only_for_several_workers(workers: int, sizes: list[int]) -> None:
    bench = Bench(batch_of("a", 20))
    room = Capacity(target=8, window=100, workers=workers, slots=3 * workers, floor=2)
    sent = []
    while isinstance(chunk := bench.send(room), str):
        sent.append(len(bench.positions(chunk)))
    assert sent == sizes


def test_a_failed_attempt_is_sent_again_after_a_while_and_counted() -> None:
    bench = Bench(batch_of("a", 8))
    first = str(bench.send())
    bench.answer(first, all_of(Kind.RETRY, [2]) | all_of(Kind.OUTPUT, [0, 1, 3, 4, 5, 6, 7]), done=True)
    assert isinstance(bench.send(), Wait)
    bench.now += 0.6
    second = str(bench.send())
    share = bench.book.out[second].shares[0]
    assert (share.positions.tolist(), share.attempt) == ([2], 2)
    bench.answer(second, {}, done=True, failure=Failure("engine_error", "it broke"))
    bench.now += 2
    third = str(bench.send())
    assert bench.book.out[third].shares[0].attempt == 3
    assert bench.book.batches["a"].resent == 2


def test_attempts_run_out_with_the_last_line_or_the_failure() -> None:
    bench = Bench(batch_of("a", 2))
    first = str(bench.send())
    bench.answer(first, {0: Kind.RETRY}, done=True, failure=Failure("engine_error", "it broke"))
    assert packing.exhausted(bench.lane, 2) == []
    found = packing.exhausted(bench.lane, 1)
    assert [(unpack_positions(d.positions).tolist(), d.use_line, d.code, d.attempts) for d in found] == [
        ([0], True, "attempts_exhausted", 1),
        ([1], False, "engine_error", 1),
    ]
    for decision in found:
        bench.decide(decision)
    progress = bench.book.batches["a"]
    assert progress.complete
    assert progress.rows.failed.count == 2
    assert bench.lane.retries == []
    # A late success replaces it still.
    bench.answer(first, {0: Kind.OUTPUT})
    assert progress.rows.failed.count == 1


def test_a_chunk_that_ends_in_silence_counts_as_an_attempt() -> None:
    bench = Bench(batch_of("a", 3))
    first = str(bench.send())
    bench.answer(first, {0: Kind.OUTPUT}, done=True)
    assert [(r.positions.tolist(), r.attempt, r.code) for r in bench.lane.retries] == [([1, 2], 2, "no_answer")]
    assert first not in bench.book.out


def test_the_last_message_may_overtake_others() -> None:
    bench = Bench(batch_of("a", 3))
    first = str(bench.send())
    bench.answer(first, {2: Kind.OUTPUT}, done=True, seq=1)
    assert first in bench.book.out
    bench.answer(first, {0: Kind.OUTPUT, 1: Kind.OUTPUT}, seq=0)
    assert first not in bench.book.out
    assert bench.lane.retries == []


def test_a_message_lost_on_the_way_is_no_attempt() -> None:
    bench = Bench(batch_of("a", 3))
    first = str(bench.send())
    bench.answer(first, {2: Kind.OUTPUT}, done=True, seq=1)
    assert judged(bench, seen_at=bench.now + 1) == []
    bench.now += 11
    assert judged(bench, seen_at=bench.now) == [Lost(first, False)]
    bench.lose(first, leased=False)
    assert [(r.positions.tolist(), r.attempt, r.charges) for r in bench.lane.retries] == [([0, 1], 1, 0)]


def judged(bench: Bench, *, hold_until: float = 0.0, seen_at: float | None = None) -> list[Lost]:
    seen = bench.now if seen_at is None else seen_at
    return losses.judge(bench.book, bench.now, hold_until, seen, lease_s=15, unclaimed_s=30)


def test_a_lease_that_lapsed_convicts_after_the_grace() -> None:
    bench = Bench(batch_of("a", 8))
    chunk = str(bench.send())
    losses.see_leases(bench.book, {chunk: "n"}, bench.now)
    bench.now += 5
    losses.see_leases(bench.book, {chunk: None}, bench.now)
    assert judged(bench) == []
    bench.now += 0.9 * losses.GRACE_S
    assert judged(bench) == []
    bench.now += 0.2 * losses.GRACE_S
    assert judged(bench, seen_at=bench.now - 3) == []  # Results wait in the queue: it may be done.
    assert judged(bench, hold_until=bench.now + 1) == []
    assert judged(bench) == [Lost(chunk, True, "n")]
    losses.see_leases(bench.book, {chunk: "n"}, bench.now)
    assert judged(bench) == []


def test_results_that_keep_coming_do_not_hide_a_loss_for_ever() -> None:
    bench = Bench(batch_of("a", 8))
    chunk = str(bench.send())
    losses.see_leases(bench.book, {chunk: "n"}, bench.now)
    losses.see_leases(bench.book, {chunk: None}, bench.now)
    bench.now += 61
    assert judged(bench, seen_at=0.0) == [Lost(chunk, True, "n")]


def test_a_chunk_that_later_ones_overtook_is_missing_after_a_while() -> None:
    bench = Bench(batch_of("a", 16))
    first, second = str(bench.send()), str(bench.send())
    losses.see_queues(bench.book, {QUEUE: 1}, bench.now)
    bench.now += 100
    assert judged(bench) == []  # It waits in the queue, as the other does.
    losses.see_leases(bench.book, {first: None, second: "n"}, bench.now)
    losses.see_queues(bench.book, {QUEUE: 0}, bench.now)
    bench.now += 29
    assert judged(bench) == []
    bench.now += 2
    losses.see_leases(bench.book, {second: "n"}, bench.now)
    assert judged(bench) == [Lost(first, False)]
    bench.lose(first, leased=False)
    assert [(r.attempt, r.charges) for r in bench.lane.retries] == [(1, 0)]


def test_an_empty_queue_means_missing_but_an_unknown_one_does_not() -> None:
    bench = Bench(batch_of("a", 8))
    chunk = str(bench.send())
    losses.see_queues(bench.book, {QUEUE: None}, bench.now)
    bench.now += 40
    assert judged(bench) == []
    losses.see_queues(bench.book, {QUEUE: 0}, bench.now)
    bench.now += 20
    losses.see_queues(bench.book, {QUEUE: 1}, bench.now)  # There it is.
    losses.see_queues(bench.book, {QUEUE: 0}, bench.now)
    bench.now += 20
    assert judged(bench) == []
    bench.now += 11
    assert judged(bench) == [Lost(chunk, False)]


def aimed(bench: Bench, node: str) -> str:
    drafted = bench.draft()
    assert not isinstance(drafted, Wait)
    return bench.send_picks(drafted.picks, node)


def test_a_chunk_for_a_worker_that_is_gone_is_lost_without_blame() -> None:
    bench = Bench(batch_of("a", 16))
    chunk, other = aimed(bench, "n"), str(bench.send())
    assert bench.book.out[chunk].queue == node_queue(MODEL, "n")
    for live in ({"n"}, set(), {"n"}, set()):
        bench.now += 10
        losses.see_workers(bench.book, live, bench.now)
    bench.now += 15 + losses.GRACE_S
    assert judged(bench) == []  # It may be starting anew: its lease and the grace have to pass.
    bench.now += 1
    assert judged(bench) == [Lost(chunk, False)]
    bench.lose(chunk, leased=False)
    assert [(r.attempt, r.charges, r.lapses) for r in bench.lane.retries] == [(1, 0, 0)]
    assert list(bench.book.given_up) == [chunk]
    again = bench.send()
    assert isinstance(again, str)
    assert bench.book.out[again].queue == QUEUE
    assert bench.replay().out.keys() == {other, again}


def test_a_worker_that_holds_its_chunk_is_judged_by_the_lease_alone() -> None:
    bench = Bench(batch_of("a", 8))
    chunk = aimed(bench, "n")
    losses.see_workers(bench.book, set(), bench.now)
    losses.see_leases(bench.book, {chunk: "n"}, bench.now)
    losses.see_workers(bench.book, set(), bench.now)
    bench.now += 100
    assert judged(bench) == []


def test_a_workers_own_queue_is_watched_apart_from_the_shared_one() -> None:
    bench = Bench(batch_of("a", 24))
    mine, shared = aimed(bench, "n"), str(bench.send())
    losses.see_leases(bench.book, {shared: "n"}, bench.now)
    losses.see_queues(bench.book, {node_queue(MODEL, "n"): 1}, bench.now)
    bench.now += 100
    losses.see_leases(bench.book, {shared: "n"}, bench.now)
    assert judged(bench) == []  # Later ones of another queue do not overtake it.
    losses.see_queues(bench.book, {node_queue(MODEL, "n"): 0, QUEUE: 5}, bench.now)
    bench.now += 31
    assert judged(bench) == [Lost(mine, False)]


def test_a_chunk_that_never_went_out_is_not_missing() -> None:
    bench = Bench(batch_of("a", 8))
    drafted = bench.draft()
    assert not isinstance(drafted, Wait)
    record = Dispatch("c", MODEL, 0.0, [sent_slice("a", drafted.picks[0].positions, 1)])
    bench.book.sent(record, bench.now, [], published=False)
    losses.see_queues(bench.book, {QUEUE: 0}, bench.now)
    bench.now += 100
    assert judged(bench) == []


def test_only_open_rows_are_sent_again() -> None:
    bench = Bench(batch_of("a", 8))
    chunk = str(bench.send())
    bench.answer(chunk, all_of(Kind.OUTPUT, [0, 2, 4, 6]) | all_of(Kind.ERROR, [7]))
    bench.lose(chunk, leased=False)
    assert bench.positions(str(bench.send())) == [1, 3, 5]


def test_a_row_whose_attempt_came_back_is_not_sent_twice_when_its_chunk_is_lost() -> None:
    bench = Bench(batch_of("a", 8))
    chunk = str(bench.send())
    bench.answer(chunk, {3: Kind.RETRY})
    bench.lose(chunk, leased=False)
    assert sorted(p for r in bench.lane.retries for p in r.positions.tolist()) == list(range(8))


def test_results_of_chunks_that_were_given_up_count() -> None:
    bench = Bench(batch_of("a", 8))
    chunk = str(bench.send())
    bench.lose(chunk, leased=False)
    again = str(bench.send())
    bench.answer(chunk, all_of(Kind.OUTPUT, list(range(8))), done=True)
    assert bench.book.batches["a"].complete
    bench.answer(again, all_of(Kind.OUTPUT, list(range(8))), done=True)
    assert bench.book.batches["a"].duplicates == 8
    assert bench.book.out == {}


def test_results_of_unknown_and_ended_batches_do_not_count() -> None:
    bench = Bench(batch_of("a", 8))
    chunk = str(bench.send())
    outcome = bench.book.results(
        Results(VERSION, chunk, MODEL, "n", 0, False, [part_of("b", [(0, Kind.OUTPUT, b"{}\n")])]), 1, 0.0
    )
    assert (outcome.unknown, outcome.settled) == (1, 0)
    outside = part_of("a", [(0, Kind.OUTPUT, b"{}\n"), (8, Kind.OUTPUT, b"{}\n")])
    outcome = bench.book.results(Results(VERSION, chunk, MODEL, "n", 1, False, [outside]), 2, 0.0)
    assert (outcome.unknown, outcome.settled) == (2, 0)
    bench.decide(Closed("a", 1.0))
    bench.answer(chunk, all_of(Kind.OUTPUT, [0]))
    assert bench.book.batches["a"].rows.settled.count == 0


def test_a_cancelled_batch_sends_nothing_more_and_takes_what_comes() -> None:
    bench = Bench(batch_of("a", 100), batch_of("b", 100))
    chunk = str(bench.send())
    bench.answer(chunk, {7: Kind.RETRY})
    bench.decide(Cancelled("a", 8, 1.0))
    assert bench.lane.retries == []
    assert {bench.book.out[str(bench.send())].shares[0].batch for _ in range(3)} == {"b"}
    bench.answer(chunk, all_of(Kind.OUTPUT, [0, 1]))
    assert bench.book.batches["a"].rows.settled.count == 2
    bench.lose(chunk, leased=True)
    assert bench.lane.retries == []
    assert bench.book.batches["a"].status().status == "cancelling"


def test_the_first_cut_of_a_batch_stands() -> None:
    bench = Bench(batch_of("a", 100))
    bench.decide(Expired("a", 0, 1.0))
    bench.decide(Cancelled("a", 0, 2.0))
    assert bench.book.batches["a"].cut == Expired("a", 0, 1.0)
    assert bench.book.batches["a"].status().status == "finalizing"


def test_a_paused_batch_sends_nothing_and_is_in_nobodys_way() -> None:
    bench = Bench(batch_of("a", 1000), batch_of("b", 1000))
    lost = [str(bench.send()) for _ in range(5)]
    bench.decide(Paused("a", 1.0))
    for chunk in lost:
        bench.lose(chunk, leased=False)
    # What waits to be sent again and may not takes nothing of the window.
    sent = []
    while isinstance(more := bench.send(), str):
        sent.append(more)
    assert {share.batch for chunk in sent for share in bench.book.out[chunk].shares} == {"b"}
    assert len(sent) == 5
    bench.answer(sent[0], all_of(Kind.OUTPUT, bench.positions(sent[0], "b")), batch="b", done=True)
    bench.decide(Resumed("a", 1.0))
    assert bench.book.out[str(bench.send())].shares[0].batch == "a"


def test_a_chunk_given_back_by_a_wrong_clock_is_no_attempt() -> None:
    bench = Bench(batch_of("a", 8))
    chunk = str(bench.send())
    bench.answer(chunk, {0: Kind.OUTPUT}, done=True, failure=Failure(TOO_LATE, ""))
    assert bench.book.batches["a"].clock_doubted
    assert [(r.positions.tolist(), r.attempt, r.charges) for r in bench.lane.retries] == [([1, 2, 3, 4, 5, 6, 7], 1, 0)]
    assert bench.positions(str(bench.send())) == [1, 2, 3, 4, 5, 6, 7]


def test_trimming_keeps_the_first_row_whatever_its_size() -> None:
    picks = [
        Pick("a", np.arange(3, dtype=np.uint32), 1, 0, 0, None),
        Pick("b", np.arange(2, dtype=np.uint32), 1, 0, 0, None),
    ]

    def kept(sizes: list[list[int]], most: int) -> list[list[int]]:
        return [p.positions.tolist() for p in packing.trim(picks, [np.array(s) for s in sizes], most)]

    assert kept([[5, 5, 5], [5, 5]], 100) == [[0, 1, 2], [0, 1]]
    assert kept([[5, 5, 5], [5, 5]], 20) == [[0, 1, 2], [0]]
    assert kept([[5, 5, 5], [5, 5]], 15) == [[0, 1, 2]]
    assert kept([[5, 50, 5], [5, 5]], 20) == [[0]]
    assert kept([[50, 5, 5], [5, 5]], 20) == [[0]]


def test_a_retry_that_does_not_fit_stays_in_part() -> None:
    bench = Bench(batch_of("a", 8))
    bench.lose(str(bench.send()), leased=False)
    drafted = bench.draft()
    assert not isinstance(drafted, Wait)
    bench.send_picks(packing.trim(drafted.picks, [np.full(8, 10)], 35))
    assert [r.positions.tolist() for r in bench.lane.retries] == [[3, 4, 5, 6, 7]]


@given(st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_reading_the_log_again_gives_the_same_book(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {"a": rng.randint(1, 60), "b": rng.randint(1, 60)}
    bench = Bench(*(batch_of(name, size) for name, size in sizes.items()))
    for _ in range(rng.randint(1, 60)):
        bench.now += rng.random()
        for decision in packing.exhausted(bench.lane, 3):
            bench.decide(decision)
        act = rng.random()
        chunk = rng.choice(list(bench.book.out)) if bench.book.out else None
        if act < 0.45 or chunk is None:
            bench.send()
        elif act < 0.85:
            batch = rng.choice([s.batch for s in bench.book.out[chunk].shares])
            rows = [p for p in range(sizes[batch]) if rng.random() < 0.3]
            kinds = {p: Kind(rng.choice([1, 1, 1, 2, 3])) for p in rows}
            failure = Failure(rng.choice(["x", TOO_LATE]), "y") if rng.random() < 0.2 else None
            bench.answer(chunk, kinds, batch=batch, done=rng.random() < 0.4, seq=rng.randint(0, 2), failure=failure)
        elif act < 0.88:
            assert bench.book.window_used(bench.lane) == sum(p.outstanding for p in bench.book.batches.values())
        elif act < 0.93:
            bench.lose(chunk, leased=rng.random() < 0.5)
        elif act < 0.97:
            inside = {b: [p for p in range(sizes[b]) if rng.random() < 0.3] for b in sizes}
            bench.crash(rng.choice([chunk, "an old one"]), inside, life=rng.choice("xy"))
        else:
            name = rng.choice("ab")
            decisions = [Cancelled(name, 0, 1.0), Expired(name, 0, 1.0), Paused(name, 1.0), Resumed(name, 1.0)]
            bench.decide(rng.choice([*decisions, Reprioritised(name, "high", 1.0)]))
    again = bench.replay()
    assert list(again.out) == list(bench.book.out)
    for chunk_id, out in bench.book.out.items():
        mine = [(s.batch, s.positions.tolist(), s.attempt, s.charges, s.lapses, s.tried) for s in out.shares]
        theirs = [
            (s.batch, s.positions.tolist(), s.attempt, s.charges, s.lapses, s.tried) for s in again.out[chunk_id].shares
        ]
        assert mine == theirs

    def waiting(book: Book) -> list[Any]:
        return sorted(
            (r.batch, p, r.attempt, r.charges, r.lapses, r.tried, r.code)
            for r in book.lane(MODEL).retries
            for p in book.batches[r.batch].rows.open_rows(r.positions).tolist()
        )

    assert waiting(again) == waiting(bench.book)
    assert bench.book.window_used(bench.lane) == sum(p.outstanding for p in bench.book.batches.values())
    assert again.window_used(again.lane(MODEL)) == sum(p.outstanding for p in again.batches.values())
    for name, progress in bench.book.batches.items():
        other = again.batches[name]
        every = np.arange(sizes[name], dtype=np.uint32)
        assert (other.rows.settled.get(every) == progress.rows.settled.get(every)).all()
        assert (other.rows.failed.get(every) == progress.rows.failed.get(every)).all()
        assert other.places == progress.places
        assert other.usage == progress.usage
        assert (other.resent, other.duplicates) == (progress.resent, progress.duplicates)
        assert (other.cut, other.paused, other.priority) == (progress.cut, progress.paused, progress.priority)
        assert other.clock_doubted == progress.clock_doubted
        assert progress.rows.settled.full_until(other.next_pos) == progress.rows.settled.full_until(progress.next_pos)
    # Nothing is ever forgotten: each open row that was sent is out, or waits to be sent again.
    for name, progress in again.batches.items():
        if progress.sendable:
            held = {p for c in again.out.values() for s in c.shares if s.batch == name for p in s.positions.tolist()}
            held |= {p for r in again.lane(MODEL).retries if r.batch == name for p in r.positions.tolist()}
            open_ = {p for p in range(progress.next_pos) if not progress.rows.settled.get(np.array([p], np.uint32))[0]}
            assert open_ <= held


def test_rows_whose_records_were_damaged_are_sent_again() -> None:
    bench = Bench(batch_of("a", 24))
    for _ in range(3):
        bench.send()
    bench.answer("c3", all_of(Kind.OUTPUT, [17, 18]))
    del bench.log[0:2]  # Two dispatches are lost.
    again = bench.replay()
    again.settle_recovery(0.0)
    waiting = sorted(p for r in again.lane(MODEL).retries for p in r.positions.tolist())
    skipped = [p for s in again.batches["a"].skipped for p in range(s.start, s.end)]
    assert waiting + skipped == list(range(16))
