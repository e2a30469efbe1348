"""Requests that end engines: who is charged, who is convicted, and how many engines it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import VERSION, Crash, Inside, Kind, Results
from producers.coordinator import losses, packing, suspicion
from producers.coordinator.packing import Draft, Wait
from producers.coordinator.records import Dispatch, Lost, sent_slice, unpack_positions
from tests.support.coordinators import MODEL
from tests.unit.coordinator.test_book import ROOM, Bench, all_of, batch_of

TWO = replace(ROOM, workers=2, nodes=("n", "m"))


class Engines:
    """Workers whose engines hold `inside` requests and end when one of them is poison."""

    def __init__(self, bench: Bench, poison: set[int], inside: int) -> None:
        self.bench = bench
        self.poison = poison
        self.inside = inside
        self.crashes = 0
        self.most_together = 0

    def run(self) -> None:
        """Until there is nothing to do; every chunk that can be sent is sent to one engine, then that runs."""
        bench = self.bench
        for _ in range(500):
            for decision in packing.exhausted(bench.lane, 4):
                assert {int(p) for p in unpack_positions(decision.positions)} <= self.poison, "an innocent"
                assert decision.code == "engine_crash"
                bench.decide(decision)
            chunks = []
            while isinstance(sent := bench.send(), str):
                chunks.append(sent)
            if not chunks:
                return
            # What is isolated runs when all else is done, each chunk for itself.
            chunks.sort(key=lambda c: bench.book.out[c].isolated)
            rows = [(c, p) for c in chunks for p in bench.positions(c)]
            while rows:
                together = self.together(rows)
                if self.poison & {p for _, p in together}:
                    self.most_together = max(self.most_together, len(self.poison & {p for _, p in together}))
                    self.crash(chunks, together)
                    break
                rows = rows[len(together) :]
                for chunk in {c for c, _ in together}:
                    done = not any(c == chunk for c, _ in rows)
                    bench.answer(chunk, all_of(Kind.OUTPUT, [p for c, p in together if c == chunk]), done=done)
            else:
                continue
        raise AssertionError("it does not end")

    def together(self, rows: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those of the next rows that are inside the engine at a time."""
        chunk = self.bench.book.out[rows[0][0]]
        if not chunk.isolated:
            return [r for r in rows[: self.inside] if not self.bench.book.out[r[0]].isolated]
        alone = any(share.charges >= suspicion.ALONE for share in chunk.shares)
        return [r for r in rows[: 1 if alone else self.inside] if r[0] == chunk.id]

    def crash(self, chunks: list[str], together: list[tuple[str, int]]) -> None:
        self.crashes += 1
        for chunk in chunks:
            if chunk in self.bench.book.out:
                mine = [p for c, p in together if c == chunk]
                self.bench.crash(chunk, {"a": mine}, life=str(self.crashes))


def check(bench: Bench, poison: set[int]) -> None:
    progress = bench.book.batches["a"]
    assert progress.complete
    every = np.arange(progress.batch.planned, dtype=np.uint32)
    assert set(np.flatnonzero(progress.rows.failed.get(every)).tolist()) == poison


@pytest.mark.parametrize("poison", [{5}, {1, 2, 7}, set(range(8))])
def test_requests_that_meet_in_one_engine_cost_two_engines_one_group_and_two_each(poison: set[int]) -> None:
    bench = Bench(batch_of("a", 60))
    engines = Engines(bench, poison, inside=8)
    engines.run()
    check(bench, poison)
    assert engines.most_together == len(poison)
    assert engines.crashes == 3 + 2 * len(poison)


@given(st.sets(st.integers(0, 59), min_size=1, max_size=6), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_no_request_costs_more_than_five_engines_and_no_neighbour_its_answer(poison: set[int], inside: int) -> None:
    bench = Bench(batch_of("a", 60))
    engines = Engines(bench, poison, inside)
    engines.run()
    check(bench, poison)
    assert engines.crashes <= suspicion.CONVICTED * len(poison)


def test_only_who_was_inside_is_charged_and_all_go_out_again_at_once() -> None:
    bench = Bench(batch_of("a", 8))
    chunk = str(bench.send())
    bench.answer(chunk, {0: Kind.OUTPUT})
    bench.crash(chunk, {"a": [0, 1, 2], "gone": [3]})
    assert bench.book.out == {}
    assert chunk in bench.book.given_up
    assert {(tuple(r.positions.tolist()), r.charges, r.tried) for r in bench.lane.retries} == {
        ((1, 2), 1, "n"),
        ((3, 4, 5, 6, 7), 0, ""),
    }
    assert bench.positions(str(bench.send())) == [1, 2, 3, 4, 5, 6, 7]


def test_a_report_counts_once_and_one_that_comes_late_convicts_nobody() -> None:
    bench = Bench(batch_of("a", 8))
    first = str(bench.send())
    bench.lose(first, leased=True)
    second = str(bench.send())
    for _ in range(2):
        bench.crash(first, {"a": [3]})
        assert {(tuple(s.positions.tolist()), s.charges) for s in bench.book.out[second].shares} == {
            ((3,), 1),
            ((0, 1, 2, 4, 5, 6, 7), 0),
        }
    bench.crash(second, {"a": [3]}, life="2")
    for life in "345":
        bench.crash("an older one", {"a": [3]}, life=life)
    assert max(r.charges for r in bench.lane.retries) == suspicion.SUSPECT
    assert packing.exhausted(bench.lane, 4) == []


def test_a_late_report_is_needed_by_the_batches_it_names() -> None:
    bench = Bench(batch_of("a", 8), batch_of("b", 8))
    inside = Inside("a", b"\0\0\0\0")
    report = Results(VERSION, "gone", MODEL, "n", 0, False, [], crash=Crash("1", "", [inside, Inside("ended", b"")]))
    assert bench.book.needing(report) == {"a"}
    chunk = str(bench.send())
    ours = Results(VERSION, chunk, MODEL, "n", 0, False, [], crash=Crash("1", "", []))
    assert bench.book.needing(ours) == {share.batch for share in bench.book.out[chunk].shares}


def test_losses_without_a_report_charge_only_after_three_in_a_row() -> None:
    bench = Bench(batch_of("a", 4))
    seen = []
    for _ in range(8):
        chunk = str(bench.send())
        bench.lose(chunk, leased=True)
        seen.append(max(r.charges for r in bench.lane.retries))
    assert seen == [0] * 2 + [1] * 3 + [2] * 3
    # One that came back, with whatever failure, had nothing to do with it.
    chunk = str(bench.send())
    (row,) = bench.positions(chunk)[:1]
    bench.answer(chunk, {row: Kind.RETRY})
    assert [r.lapses for r in bench.lane.retries if row in r.positions] == [0]


def test_nobody_is_convicted_in_company_without_a_report() -> None:
    bench = Bench(batch_of("a", 4))
    for _ in range(200):
        found = packing.exhausted(bench.lane, 4)
        if found:
            break
        chunk = str(bench.send())
        alone = len(bench.positions(chunk)) == 1
        bench.lose(chunk, leased=True)
    assert alone
    assert [len(unpack_positions(d.positions)) for d in found] == [1]


def drafted(bench: Bench, room: Any) -> Draft:
    found = bench.draft(room)
    assert isinstance(found, Draft)
    return found


def test_suspects_go_alone_to_one_worker_another_where_there_is_one() -> None:
    bench = Bench(batch_of("a", 8), batch_of("b", 30))
    for life in "12":
        chunk = str(bench.send())
        while 4 not in bench.positions(chunk):
            chunk = str(bench.send())
        bench.crash(chunk, {"a": [4, 5]}, life=life)
    draft = drafted(bench, TWO)
    assert (draft.isolated, draft.node) == (suspicion.MOST_ISOLATED, "m")
    assert [(p.batch, p.positions.tolist()) for p in draft.picks] == [("a", [4, 5])]
    chunk = bench.send_picks(draft.picks)
    # The other worker goes on with everybody else's work.
    bench.crash(str(bench.send()), {"b": [0]}, life="3")
    assert not drafted(bench, TWO).isolated
    bench.answer(chunk, all_of(Kind.OUTPUT, [4, 5]), done=True)
    assert bench.book.batches["a"].rows.failed.count == 0


def test_what_one_worker_failed_at_goes_to_another_before_it_is_final() -> None:
    bench = Bench(batch_of("a", 2))
    bench.answer(str(bench.send()), all_of(Kind.RETRY, [0, 1]), done=True)
    bench.now += 60
    assert drafted(bench, TWO).node == "m"
    assert drafted(bench, replace(TWO, nodes=("n",))).node == ""
    # It was alone for all its attempts; now there is another.
    assert packing.exhausted(bench.lane, 1, ("n",)) != []
    assert packing.exhausted(bench.lane, 1, ("n", "m")) == []
    bench.answer(str(bench.send(TWO)), all_of(Kind.RETRY, [0, 1]), node="m", done=True)
    assert [d.attempts for d in packing.exhausted(bench.lane, 1, ("n", "m"))] == [2]


def test_what_was_lost_with_a_worker_goes_before_what_waits_and_not_to_that_worker() -> None:
    three = replace(ROOM, workers=3, nodes=("n", "m", "k"))
    bench = Bench(batch_of("a", 100))
    chunk = str(bench.send())
    losses.see_leases(bench.book, {chunk: "n"}, bench.now)
    bench.log.append(Lost(chunk, True, "n"))
    bench.book.lost(bench.log[-1], bench.now)
    assert bench.lane.silent == {"n"}
    left = replace(three, nodes=tuple(n for n in three.nodes if n not in bench.lane.silent))
    sent = []
    for _ in range(3):
        draft = drafted(bench, left)
        bench.numbers += 1
        pieces = [sent_slice(p.batch, p.positions, p.attempt, p.charges, p.lapses, p.tried) for p in draft.picks]
        record = Dispatch(f"c{bench.numbers}", MODEL, bench.now, pieces, draft.node)
        bench.book.sent(record, bench.now)
        sent.append((draft.node, bench.positions(record.chunk)))
    assert sent == [("m", [0, 1, 2, 3]), ("k", [4, 5]), ("m", [6, 7])]
    assert drafted(bench, left).node == ""
    # It is back: it holds something.
    losses.see_leases(bench.book, {"c2": "n"}, bench.now)
    assert bench.lane.silent == set()


def test_what_was_lost_waits_for_room_in_an_own_queue_and_not_behind_the_window() -> None:
    two = replace(ROOM, workers=2, nodes=("n", "m"))
    bench = Bench(batch_of("a", 100))
    lost = [str(bench.send()) for _ in range(4)]
    rows = [pos for chunk in lost for pos in bench.positions(chunk)]
    for chunk in lost:
        bench.lose(chunk, leased=True)
    left = replace(two, nodes=("m",))
    ahead = [str(bench.send(left)) for _ in range(packing.AHEAD)]
    assert {bench.book.out[chunk].target for chunk in ahead} == {"m"}
    again = [pos for chunk in ahead for pos in bench.positions(chunk)]
    # Its own queue is full: others' work goes on, within the window.
    behind = [str(bench.send(replace(left, window=left.window + 8))) for _ in range(2)]
    assert all(not bench.book.out[chunk].target for chunk in behind)
    assert not {pos for chunk in behind for pos in bench.positions(chunk)} & set(rows)
    while len(again) < len(rows):
        bench.answer(ahead[0], all_of(Kind.OUTPUT, bench.positions(ahead[0])), node="m", done=True)
        ahead = [*ahead[1:], str(bench.send(left))]
        assert bench.book.out[ahead[-1]].target == "m"
        again += bench.positions(ahead[-1])
    assert again == rows
    # Nobody is left: then it is anybody's.
    bench.lose(ahead[-1], leased=True)
    assert drafted(bench, replace(two, nodes=())).node == ""


def test_rows_that_were_answered_after_all_are_not_sent_again() -> None:
    bench = Bench(batch_of("a", 4))
    first = str(bench.send())
    bench.lose(first, leased=True)
    bench.answer(first, all_of(Kind.OUTPUT, [0, 1]))
    assert bench.positions(str(bench.send())) == [2, 3]
    bench.lose("c2", leased=False)
    bench.answer(first, all_of(Kind.OUTPUT, [2, 3]))
    assert isinstance(bench.send(), Wait)
    assert bench.lane.retries == []


def test_records_of_earlier_versions_convict_nobody() -> None:
    bench = Bench(batch_of("a", 4))
    chunk = str(bench.send())
    share = bench.book.out[chunk].shares[0]
    record = bench.log[0]
    old = replace_slices(record, losses=7)
    bench.book.out.clear()
    bench.book.sent(old, 0.0)
    assert bench.book.out[chunk].shares[0].charges == suspicion.CONVICTED - 1
    assert share.charges == 0
    bench.book.lost(Lost(chunk, True), 0.0)
    assert packing.exhausted(bench.lane, 4) == []


def replace_slices(record: Any, losses: int) -> Any:
    import msgspec

    return msgspec.structs.replace(record, slices=[msgspec.structs.replace(s, charges=losses) for s in record.slices])
