"""What requests cost is learnt from answers, and shares go by it."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fairness import batch_of
from benchmarks.simulated_fleet import Fleet
from common.messages import Kind, Usage
from common.settings import Scheduler
from producers.coordinator.costs import MOST, PRIOR_TOKENS, Costs
from tests.support.coordinators import part_of
from tests.unit.coordinator.test_book import Bench
from tests.unit.coordinator.test_book import batch_of as book_batch

tokens = st.floats(0, 1e9)


@given(st.lists(st.tuples(tokens, tokens)), tokens)
def test_a_factor_is_bounded_whatever_is_said(seen: list[tuple[float, float]], otherwise: float) -> None:
    costs = Costs()
    for estimated, measured in seen:
        costs.add(estimated, measured)
        assert 1 / MOST <= costs.factor(otherwise) <= MOST


def test_a_factor_comes_to_what_is_measured_and_follows_it() -> None:
    costs = Costs()
    assert costs.factor() == 1
    assert costs.factor(0.3) == pytest.approx(0.3), "nothing is known but what the others do"
    costs.add(PRIOR_TOKENS, PRIOR_TOKENS / 2)
    assert costs.factor() == pytest.approx(0.75)
    for _ in range(400):
        costs.add(10_000, 1500)
    assert costs.factor() == pytest.approx(0.15, rel=0.1)
    for _ in range(1000):
        costs.add(10_000, 9000)
    assert costs.factor() == pytest.approx(0.9, rel=0.1)
    costs.add(0, 500)
    costs.add(500, 0)
    assert costs.factor() == pytest.approx(0.9, rel=0.1), "an engine that tells no tokens teaches nothing"


def test_batches_share_by_what_their_answers_cost_not_by_what_they_might() -> None:
    """Both say `max_tokens` 1024; the answers of one are sixteen times as long."""
    fleet = Fleet(Scheduler(queue_size=131_072), [1.0] * 4)
    for name, answer in (("short", 50), ("long", 800)):
        requests = 120_000 if name == "short" else 12_000
        fleet.submit(
            batch_of(name, requests, 1024 * requests), np.full(requests, answer), np.full(requests, 1024, np.int64)
        )

    def done(until: float) -> dict[str, int]:
        fleet.run(lambda: fleet.now > until)
        return {name: p.usage.completion_tokens for name, p in fleet.book.batches.items()}

    # Until the first long answers are there nobody knows.
    first, second = done(60), done(240)
    assert set(second) == {"short", "long"}, "both still run"
    assert second["short"] - first["short"] == pytest.approx(second["long"] - first["long"], rel=0.3)


def test_what_a_new_batch_costs_is_thought_to_be_as_others_have_shown() -> None:
    bench = Bench(book_batch("a", 16))
    bench.lane.costs.add(1e9, 1e8)
    drafted = bench.draft()
    chunk = bench.send_picks([p._replace(cost=1000) for p in drafted.picks])  # type: ignore[union-attr]
    share = bench.book.out[chunk].shares[0]
    assert share.cost > 0
    assert share.charged == pytest.approx(share.cost / 10, rel=0.01)


def test_the_share_of_the_work_counts_long_requests_for_more() -> None:
    bench = Bench(msgspec.structs.replace(book_batch("a", 16), cost=16_000))
    progress = bench.book.batches["a"]
    first = bench.send_picks([p._replace(cost=12_000) for p in bench.draft().picks])  # type: ignore[union-attr]
    second = bench.send_picks([p._replace(cost=4000) for p in bench.draft().picks])  # type: ignore[union-attr]
    rows = bench.positions(first)
    part = part_of("a", [(p, Kind.OUTPUT, b"{}\n") for p in rows], Usage(800, 2200))
    bench.take(first, [part])
    assert progress.work_done == pytest.approx(0.75)
    assert json.loads(msgspec.json.encode(progress.status()))["work_done"] == progress.work_done
    assert progress.costs.factor() < 1
    bench.answer(second, dict.fromkeys(bench.positions(second), Kind.ERROR), done=True)
    assert (progress.complete, progress.work_done) == (True, 1.0)
