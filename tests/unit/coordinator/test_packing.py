"""What goes into the next chunk: whose turn it is, who may not go out, what an attempt or a loss costs its batch."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec

from common.messages import Kind
from producers.batch import Batch
from producers.coordinator.capacity import Capacity
from producers.coordinator.packing import Wait
from producers.coordinator.records import Paused, Reprioritised, Resumed
from tests.unit.coordinator.test_book import ROOM, Bench, all_of, batch_of

WIDE = Capacity(target=8, window=10_000, workers=1, slots=3, floor=2)


def with_(name: str, planned: int, **fields: object) -> Batch:
    return msgspec.structs.replace(batch_of(name, planned), cost=100 * planned, **fields)


def sent(bench: Bench, chunks: int, room: Capacity = WIDE) -> dict[str, int]:
    """Rows of each batch in the next chunks."""
    found: dict[str, int] = {}
    for _ in range(chunks):
        for share in bench.book.out[str(bench.send(room))].shares:
            found[share.batch] = found.get(share.batch, 0) + len(share.positions)
    return found


def test_a_small_batch_behind_a_large_one_is_in_the_next_chunk() -> None:
    bench = Bench(with_("large", 100_000))
    assert sent(bench, 50) == {"large": 400}
    for name in ("b", "c"):
        bench.book.open(with_(name, 3))
    assert sent(bench, 1) == {"b": 3, "c": 3, "large": 2}
    assert sent(bench, 10) == {"large": 80}


def test_batches_share_by_priority_and_tenants_by_weight() -> None:
    bench = Bench(with_("low", 9999, priority="low"), with_("high", 9999, priority="high"))
    assert sent(bench, 170) == {"low": 80, "high": 1280}
    bench.book.open(with_("other", 9999, tenant="other"))
    got = sent(bench, 170)
    assert got["other"] == 680


def test_another_priority_counts_from_the_next_chunk_on() -> None:
    bench = Bench(with_("a", 9999, priority="low"), with_("b", 9999, priority="urgent"))
    assert sent(bench, 3) == {"a": 8, "b": 16}
    bench.decide(Reprioritised("a", "urgent", 0.0))
    got = sent(bench, 10)
    assert got["a"] >= 32


def test_a_deadline_that_nears_weighs() -> None:
    bench = Bench(with_("due", 99_999, created_at=0.0, expires_at=1100.0), with_("other", 99_999))
    bench.now = 990.0
    got = sent(bench, 110)
    assert got["due"] == 800
    assert got["other"] == 80


def test_what_may_not_go_out_is_passed_over_and_told_when_it_may() -> None:
    bench = Bench(with_("a", 16), with_("late", 16, not_before=130.0))
    assert sent(bench, 1) == {"a": 8}
    bench.decide(Paused("a", 0.0))
    waiting = bench.send()
    assert isinstance(waiting, Wait)
    assert waiting.until == 130.0
    bench.now = 130.0
    assert sent(bench, 2) == {"late": 16}
    assert isinstance(bench.send(), Wait)
    bench.decide(Resumed("a", 0.0))
    assert sent(bench, 1) == {"a": 8}
    assert isinstance(bench.send(), Wait)


def test_a_batch_whose_hours_are_over_sleeps_until_they_begin_again() -> None:
    bench = Bench(with_("night", 9999, run_between="22:00-06:00"))
    bench.now = 5 * 3600.0 + 3599
    first = str(bench.send())
    bench.answer(first, all_of(Kind.RETRY, list(range(8))), done=True)
    bench.now += 1
    waiting = bench.send()
    assert isinstance(waiting, Wait)
    assert waiting.until <= bench.now + 3600
    bench.now = 22 * 3600.0
    assert isinstance(bench.send(), str)


def test_rows_of_a_paused_batch_that_wait_to_be_sent_again_take_no_room() -> None:
    bench = Bench(with_("a", 40), with_("b", 40, timeout_s=5.0))
    while isinstance(chunk := bench.send(), str):
        assert bench.book.window_used(bench.lane) <= ROOM.window
        bench.answer(chunk, all_of(Kind.RETRY, bench.positions(chunk)), done=True)
    bench.now += 1
    bench.decide(Paused("a", 0.0))
    got = sent(bench, 5, ROOM)
    assert got == {"b": 40}
    assert isinstance(bench.send(), Wait)


def test_a_chunk_is_of_batches_that_use_the_cache_in_one_way_and_have_one_timeout() -> None:
    """These stand in the chunk once: whoever asked for no cache must get no answer of it, on no attempt."""
    ways = [("off", 60.0), ("read", 60.0), ("write", 60.0), ("on", 60.0), ("on", 5.0)]
    batches = [
        with_(f"{cache}{timeout_s:g}{which}", 3, cache=cache, timeout_s=timeout_s)
        for cache, timeout_s in ways
        for which in "ab"
    ]
    bench = Bench(*batches)

    def send_all(room: Capacity) -> list[str]:
        bench.now += 60
        chunks = []
        while isinstance(chunk := bench.send(room), str):
            chunks.append(chunk)
        together = [{share.batch for share in bench.book.out[chunk].shares} for chunk in chunks]
        assert {name for names in together for name in names} == {batch.id for batch in batches}
        assert all(len({name[:-1] for name in names}) == 1 for names in together), together
        return chunks

    def fail(chunk: str) -> None:
        names = sorted({share.batch for share in bench.book.out[chunk].shares})
        for name in names:
            rows = all_of(Kind.RETRY, bench.positions(chunk, name))
            bench.answer(chunk, rows, batch=name, done=name == names[-1])

    for chunk in send_all(WIDE):
        fail(chunk)
    # What failed on one worker goes to the other's own queue.
    for chunk in send_all(dataclasses.replace(WIDE, nodes=("n", "m"))):
        fail(chunk)
    send_all(WIDE)


def test_attempts_and_losses_count_against_their_batch() -> None:
    """A batch all of whose requests fail must not take the workers from one whose requests do not."""
    # Answers cost what they were thought to.
    bench = Bench(*(msgspec.structs.replace(with_(name, 9999), cost=10 * 9999) for name in ("bad", "good")))
    answered: dict[str, int] = {"bad": 0, "good": 0}
    for turn in itertools.count():
        bench.now += 0.2
        chunk = str(bench.send(WIDE))
        share = bench.book.out[chunk].shares[0]
        answered[share.batch] += 8
        if share.batch == "good":
            bench.answer(chunk, all_of(Kind.OUTPUT, bench.positions(chunk, "good")), batch="good", done=True)
        elif turn % 4:
            bench.answer(chunk, all_of(Kind.RETRY, bench.positions(chunk, "bad")), batch="bad", done=True)
        else:
            bench.lose(chunk, leased=False)
        if turn == 99:
            break
    assert abs(answered["good"] - answered["bad"]) <= 16


def test_many_batches_are_put_aside_as_they_are_sent() -> None:
    bench = Bench(*(with_(f"b{n:04}", 5) for n in range(2000)))
    room = Capacity(target=50, window=1 << 30, workers=1, slots=3, floor=2)
    chunks = [str(bench.send(room)) for _ in range(100)]
    assert [s.batch for s in bench.book.out[chunks[-1]].shares] == [f"b{n:04}" for n in range(990, 1000)]
    assert len(bench.lane.fresh) == 1000
    assert len(bench.lane.fair.active) == 1000


def test_chunks_shrink_at_the_end_of_all_batches_not_of_each() -> None:
    bench = Bench(*(with_(name, 40) for name in "abc"))
    room = Capacity(target=8, window=1000, workers=2, slots=6, floor=2)
    sizes = []
    while isinstance(chunk := bench.send(room), str):
        sizes.append(sum(len(s.positions) for s in bench.book.out[chunk].shares))
    full = sizes.count(8)
    assert sizes == [8] * full + sorted(sizes[full:], reverse=True)
    assert sum(sizes[:full]) > 120 - 6 * 8
    assert sizes[-1] == room.floor
