"""Fair queueing: its stated bounds hold whatever flows come and go, with whatever weights and costs."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.coordinator.fair_queue import FairQueue
from producers.coordinator.weights import DEADLINE_MOST, urgency

COSTS = st.lists(st.integers(1, 1000), min_size=1, max_size=150)
WEIGHTS = st.sampled_from([0.5, 1.0, 4.0, 16.0, 64.0])


class Flow(NamedTuple):
    tenant: str
    weight: float
    tenant_weight: float


#: Tenants that weigh what they weigh whoever of their batches is asked.
FLOWS = st.dictionaries(
    st.integers(0, 9).map("b{}".format),
    st.builds(
        lambda tenant, weight: Flow(tenant, weight, {"x": 1.0, "y": 2.0, "z": 8.0}[tenant]),
        st.sampled_from("xyz"),
        WEIGHTS,
    ),
    min_size=1,
)


def queue_of(flows: dict[str, Flow]) -> FairQueue:
    queue = FairQueue()
    for name, flow in flows.items():
        queue.activate(name, flow.tenant)
        queue.weigh(name, flow.weight, flow.tenant_weight)
    return queue


def serve(queue: FairQueue, cost: float) -> str:
    name = queue.round().next()
    assert name is not None
    queue.charge(name, cost)
    return name


@given(FLOWS, COSTS)
@settings(max_examples=150, deadline=None)
def test_service_of_flows_that_always_have_work_differs_by_no_more_than_the_bound(
    flows: dict[str, Flow], costs: list[int]
) -> None:
    queue = queue_of(flows)
    most = max(costs)
    history: list[Counter[str]] = [Counter()]
    for cost in costs:
        served = history[-1].copy()
        served[serve(queue, cost)] += cost
        history.append(served)
    # In every interval: from here to the end, from the start to here, and over the middle.
    third = len(costs) // 3
    for begin, end in ((0, -1), (third, -1), (0, third), (third, 2 * third)):
        got = history[end] - history[begin]
        for one, other in combinations(flows, 2):
            f, g = flows[one], flows[other]
            if f.tenant == g.tenant:
                apart = abs(got[one] / f.weight - got[other] / g.weight)
                assert apart <= most / f.weight + most / g.weight + 1e-6
        tenants = {f.tenant: f.tenant_weight for f in flows.values()}
        share = {t: sum(got[n] for n, f in flows.items() if f.tenant == t) for t in tenants}
        for a, b in combinations(tenants, 2):
            apart = abs(share[a] / tenants[a] - share[b] / tenants[b])
            assert apart <= most / tenants[a] + most / tenants[b] + 1e-6


@given(FLOWS, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 500)), max_size=200))
@settings(max_examples=150, deadline=None)
def test_whoever_comes_and_goes_the_queue_serves_while_there_is_work_and_always_the_same_way(
    flows: dict[str, Flow], acts: list[tuple[int, int, int]]
) -> None:
    def play() -> list[str]:
        queue, active, order = queue_of(flows), set(flows), []
        for act, number, cost in acts:
            name = f"b{number}"
            if act == 0 and name in flows:
                queue.activate(name, flows[name].tenant)
                active.add(name)
            elif act == 1 and name in flows:
                queue.deactivate(name)
                active.discard(name)
            elif act == 2:
                found = queue.round().next()
                assert (found is not None) == bool(active)
                if found is not None:
                    assert found in active
                    queue.charge(found, cost)
                    order.append(found)
            assert set(queue.active) == active
            named = []
            turn = queue.round()
            while (one := turn.next()) is not None:
                named.append(one)
                turn.took(cost)
            assert sorted(named) == sorted(active)
        return order

    assert play() == play()


@given(
    st.integers(1, 5), st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.lists(st.integers(1, 1000)), WEIGHTS
)
@settings(max_examples=100, deadline=None)
def test_a_batch_that_comes_new_is_served_before_any_other_twice(
    others: int, before: list[int], after: list[int], weight: float
) -> None:
    queue = FairQueue()
    for number in range(others):
        queue.activate(f"old{number}", "t")
        queue.weigh(f"old{number}", 4.0, 1.0)
    for cost in before:
        serve(queue, cost)
    queue.activate("new", "t")
    queue.weigh("new", weight, 1.0)
    turns: Counter[str] = Counter()
    while not turns["new"]:
        turns[serve(queue, after.pop() if after else 1000)] += 1
        assert max(turns.values()) == 1
    assert turns.total() <= others + 1


@given(FLOWS, COSTS)
@settings(max_examples=100, deadline=None)
def test_nobody_starves(flows: dict[str, Flow], costs: list[int]) -> None:
    """Each gets its share of all service, less what one service of each other, and of its own, may weigh."""
    queue = queue_of(flows)
    got: Counter[str] = Counter()
    most = max(costs)
    for cost in costs:
        got[serve(queue, cost)] += cost
    tenants = {f.tenant: f.tenant_weight for f in flows.values()}
    for name, flow in flows.items():
        mine = sum(got[n] for n, f in flows.items() if f.tenant == flow.tenant)
        weights = [f.weight for f in flows.values() if f.tenant == flow.tenant]
        owed = mine * flow.weight / sum(weights)
        assert got[name] >= owed - most * (1 + len(weights) * flow.weight / min(weights))
        owed = sum(costs) * flow.tenant_weight / sum(tenants.values())
        assert mine >= owed - most * (1 + len(tenants) * flow.tenant_weight / min(tenants.values()))


def test_a_pause_neither_saves_up_nor_owes() -> None:
    queue = FairQueue()
    queue.activate("a", "t")
    queue.activate("b", "t")
    for _ in range(10):
        serve(queue, 100)
    queue.deactivate("b")
    for _ in range(100):
        assert serve(queue, 100) == "a"
    queue.activate("b", "t")
    assert sorted(serve(queue, 100) for _ in range(10)) == ["a"] * 5 + ["b"] * 5
    # While nobody else wanted anything, what was taken is not held against it either.
    queue.deactivate("a")
    queue.deactivate("b")
    queue.activate("c", "t")
    queue.activate("a", "t")
    assert sorted(serve(queue, 100) for _ in range(10)) == ["a"] * 5 + ["c"] * 5


def test_more_weight_counts_at_once() -> None:
    queue = FairQueue()
    for name, weight in (("light", 1.0), ("heavy", 64.0)):
        queue.activate(name, "t")
        queue.weigh(name, weight, 1.0)
    assert serve(queue, 1000) == "light"
    assert [serve(queue, 1000) for _ in range(3)] == ["heavy"] * 3
    # By its old weight it would wait for sixty more.
    queue.weigh("light", 64.0, 1.0)
    assert "light" in [serve(queue, 1000) for _ in range(2)]


def test_tenants_share_by_their_weights_however_many_batches_each_has() -> None:
    flows = {f"many{n}": Flow("many", 64.0, 1.0) for n in range(50)} | {"one": Flow("few", 1.0, 3.0)}
    queue = queue_of(flows)
    served = Counter(flows[serve(queue, 100)].tenant for _ in range(400))
    assert served == {"few": 300, "many": 100}


def test_one_chunk_is_shared_by_tenants_in_turn() -> None:
    queue = queue_of({"a1": Flow("a", 1.0, 1.0), "a2": Flow("a", 1.0, 1.0), "b1": Flow("b", 1.0, 1.0)})
    turn = queue.round()
    order = []
    while (name := turn.next()) is not None:
        order.append(name)
        turn.took(10)
    assert order == ["a1", "b1", "a2"]
    assert queue.round().next() == "a1"


def test_what_is_forgotten_leaves_nothing() -> None:
    queue = FairQueue()
    for number in range(1000):
        queue.activate(f"b{number}", f"t{number}")
        serve(queue, 5)
        queue.forget(f"b{number}")
    queue.forget("never there")
    assert queue.active == []
    assert len(queue._tenants.flows) <= 2


@pytest.mark.parametrize(("left", "factor"), [(2000, 1), (1000, 1), (500, 2), (100, 10), (10, 16), (0, 16), (-5, 16)])
def test_urgency_grows_as_the_deadline_nears_up_to_a_bound(left: float, factor: float) -> None:
    assert urgency(0.0, 1000.0, 1000.0 - left) == factor <= DEADLINE_MOST
    assert urgency(5.0, 5.0, 0.0) == DEADLINE_MOST


def test_what_was_charged_too_much_is_given_back_and_is_nobodys_debt() -> None:
    fair = FairQueue()
    for name in "ab":
        fair.activate(name, "t")
        fair.charge(name, 100.0)
    fair.correct("a", -90.0)
    served = []
    for _ in range(9):
        served.append(str(fair.round().next()))
        fair.charge(served[-1], 10.0)
    assert served == ["a"] * 9, "until it has had as much as the other"
    fair.deactivate("b")
    fair.charge("a", 1000.0)
    fair.correct("a", -1000.0)
    fair.activate("new", "t")
    served = []
    for _ in range(10):
        served.append(str(fair.round().next()))
        fair.charge(served[-1], 10.0)
    assert abs(served.count("new") - served.count("a")) <= 1, "a new one begins beside it"
    fair.correct("unheard of", -5.0)


def test_a_new_one_does_not_wait_for_what_another_gets_back() -> None:
    fair = FairQueue()
    fair.activate("large", "t")
    for _ in range(10):
        fair.charge("large", 1000.0)
    fair.activate("new", "t")
    fair.correct("large", -9900.0)
    served = []
    for _ in range(10):
        served.append(str(fair.round().next()))
        fair.charge(served[-1], 10.0)
    assert abs(served.count("new") - served.count("large")) <= 1
