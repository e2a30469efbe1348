"""The planner's order: a permutation in which whatever shares a prefix stands together, and in which work is mixed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.pieces import Pieces
from producers import planner as planner_module
from producers.analyze.kv_cache import KvCache
from producers.planner import BLOCK, EXACT_BYTES, MAX_COST, STEP_BYTES, Order, Planner, hold_key, prefix_key, token_cost

#: Few letters, so that prefixes are shared; many lengths.
outputs = st.integers(1, 4096)


def many(seed: int) -> list[tuple[bytes, int]]:
    """Prompts and answers, more than stay as sorted, which lists that are drawn one by one seldom have."""
    rng = random.Random(seed)
    texts = ("".join(rng.choices("ab", k=rng.randint(0, 12))) for _ in range(rng.randint(33, 150)))
    return [(text.encode(), rng.choice([rng.randint(1, 4096), 1, 4096])) for text in texts]


few_rows = st.lists(st.tuples(st.text("ab", max_size=12).map(str.encode), outputs), max_size=120)
any_rows = few_rows | st.integers(0, 2**32).map(many)


def order(keys: Sequence[bytes], bodies: Sequence[bytes] | None = None, block: int = BLOCK) -> list[int]:
    return planned(Planner(block), keys, [16] * len(keys), bodies).places


def planned(
    planner: Planner, keys: Sequence[bytes], answers: Sequence[int], bodies: Sequence[bytes] | None = None
) -> Order:
    costs = [token_cost(len(key), answer) for key, answer in zip(keys, answers, strict=True)]
    return planner.order(keys, bodies or keys, costs, answers)


def in_common(a: bytes, b: bytes) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(any_rows, max_size=3))
def test_the_order_is_a_permutation_and_the_same_every_time(windows: list[list[tuple[bytes, int]]]) -> None:
    one, other = Planner(1), Planner(1)
    for window in windows:
        keys, answers = [k for k, _ in window], [n for _, n in window]
        found = planned(one, keys, answers)
        assert sorted(found.places) == list(range(len(keys)))
        again = planned(other, keys, answers)
        assert found == again


@given(any_rows, st.booleans())
@example([(b"a" * (n // 40) + b"%d" % (n * n), 1 + n * n % 1000) for n in range(400)], False)
@example([(b"%d" % (n * n), 1 + n * n % 1000) for n in range(400)], True)
def test_a_window_of_few_rows_is_planned_as_one_of_many(rows: list[tuple[bytes, int]], backwards: bool) -> None:
    """The two walks are one, written twice."""
    found = []
    for few in (0, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner_module, "FEW_ROWS", few)
            planner = Planner(1)
            if backwards:
                planner.order([b"x"], [b"x"], [2], [1])
            found.append(planned(planner, [key for key, _ in rows], [answer for _, answer in rows]))
    assert found[0] == found[1]


@given(any_rows, st.booleans())
def test_rows_that_share_any_prefix_stand_together(rows: list[tuple[bytes, int]], second: bool) -> None:
    """Whatever answers cost, and whichever way the window is walked."""
    keys, planner = [k for k, _ in rows], Planner(1)
    if second:
        planner.order([b"x"], [b"x"], [2], [1])
    found = planned(planner, keys, [n for _, n in rows])
    walked = [keys[n] for n in found.places]
    for prefix in {key[:size] for key in keys for size in range(len(key) + 1)}:
        places = [n for n, key in enumerate(walked) if key.startswith(prefix)]
        assert places == list(range(places[0], places[0] + len(places)))
    # Of a prompt that is the same, all of it counts, in whole tokens.
    shared = [4 * token_cost(len(a), 0) if a == b and a else in_common(a, b) for a, b in itertools.pairwise(walked)]
    assert found.shared[1:] == [n - min(shared) for n in shared]


#: Prompts and answers of which some mostly read and some mostly write; so few rows stay as sorted.
@given(st.lists(st.tuples(st.integers(1, 2000), outputs), min_size=33, max_size=120), st.integers(0, 2**32))
@example([(2000, 1)] * 40 + [(1, 4000)] * 40, 1)
def test_reading_and_writing_alternate(rows: list[tuple[int, int]], seed: int) -> None:
    """The bound that `large_walk._alternate` states, on rows that share nothing."""
    rng = random.Random(seed)
    keys = [rng.randbytes(8) + b"." * size for size, _ in rows]
    answers = [answer for _, answer in rows]
    places = planned(Planner(EXACT_BYTES), keys, answers).places
    reading = np.array([token_cost(len(key), 0) for key in keys])
    writing = np.array(answers)
    excess = writing - writing.sum() / (reading + writing).sum() * (reading + writing)
    running = np.cumsum(excess[places])
    assert np.abs(running).max() <= np.abs(excess).max() + len(keys)


def test_long_answers_come_first_within_what_reads_and_what_writes() -> None:
    rng = np.random.default_rng(1)
    answers = rng.integers(1, 1000, 400).tolist()
    keys = [b"%06d" % n + b"." * 400 for n in range(400)]
    places = planned(Planner(), keys, answers).places
    writers = [answers[n] for n in places if answers[n] > np.mean(answers) * 1.01]
    readers = [answers[n] for n in places if answers[n] < np.mean(answers) * 0.99]
    for mine in (writers, readers):
        assert all(later < 1.3 * earlier for earlier, later in itertools.combinations(mine, 2))
    assert max(answers[n] for n in places[-32:]) < 700, "no long answer is left to the end"
    assert min(answers[n] for n in places[:64]) < 400, "and the beginning is not all long ones"


@given(st.lists(st.tuples(st.sampled_from([b"", b"a", b"b"]), st.sampled_from([b"x", b"y", b"z"])), max_size=60))
@example([(b"a", b"x"), (b"a", b"y")] * 40)
def test_equal_rows_stand_together_in_file_order(rows: list[tuple[bytes, bytes]]) -> None:
    planned = order([k for k, _ in rows], [b for _, b in rows], 1)
    for row in set(rows):
        places = [n for n, k in enumerate(planned) if rows[k] == row]
        assert places == list(range(places[0], places[0] + len(places)))
        same = [planned[n] for n in places]
        assert same == sorted(same)


def test_what_was_seen_last_in_one_window_comes_first_in_the_next() -> None:
    """200 prefixes in ten windows, and a cache that holds half of them: no order of the windows can save more."""
    prefixes = [b"%03d" % n * 100 for n in range(200)]
    rng = np.random.default_rng(2)
    planner, cache, found = Planner(), KvCache(600), 0
    blocks: dict[bytes, int] = {}
    for _ in range(10):
        keys = [prefixes[n] + b"%08d" % rng.integers(10**8) for n in rng.permutation(np.repeat(np.arange(200), 3))]
        for n in planned(planner, keys, [10] * len(keys)).places:
            chain = [blocks.setdefault(keys[n][: 64 * (at + 1)], len(blocks)) for at in range(4)]
            found += cache.enter(chain, 4, 0) // 4
    # Two of three always, and what the cache still holds when the walk turns: 150 of 200 prefixes, nine times.
    assert found > 10 * 400 + 9 * 140


@given(st.lists(any_rows.filter(bool), min_size=1, max_size=3), st.integers(0, 60))
@settings(deadline=None)
def test_a_window_computes_each_prefix_once_whatever_the_cache(
    drawn: list[list[tuple[bytes, int]]], spare: int
) -> None:
    """No order of a window saves more, that of the file neither, if the cache has room for each request by itself.

    So the file's order can only be better by the prefixes that a later window meets anew.
    """
    # None is the beginning of another: the last token of a prompt is always computed, and whose that is would count.
    windows = [[(key + b".", answer % 4) for key, answer in rows] for rows in drawn]
    planner, blocks = Planner(1), max(len(key) + answer for rows in windows for key, answer in rows) + spare
    cache = KvCache(blocks)
    for rows in windows:
        keys = [key for key, _ in rows]
        places = planned(planner, keys, [max(1, answer) for _, answer in rows]).places
        assert cached(cache, [rows[n] for n in places]) >= cached(KvCache(1 << 40), rows)
        assert cached(KvCache(blocks), [rows[n] for n in places]) >= cached(KvCache(blocks), rows)


def cached(cache: KvCache, rows: list[tuple[bytes, int]]) -> int:
    """Blocks of one byte that are found when these prompts, with answers of so many blocks, enter one by one."""
    found = 0
    for key, answer in rows:
        chain = [int.from_bytes(key[: n + 1], "big") for n in range(len(key))]
        found += cache.enter(chain, len(key) - 1, answer)
    return found


def test_the_first_row_of_a_window_says_what_it_shares_with_the_last_of_the_one_before() -> None:
    planner, stem = Planner(), b"s" * 640
    assert planned(planner, [stem + b"a", stem + b"b"], [9, 9]).shared == [0, 0], "all have the stem, and none before"
    assert planned(planner, [stem + b"c"], [9]).shared == [640]
    assert planned(planner, [b"other"], [9]).shared == [0]


def test_long_prompts_stand_together_by_what_they_share() -> None:
    """Beyond the exact part the key holds hashes; rows of one conversation must still not be torn apart."""
    stems = [bytes([65 + n]) * (EXACT_BYTES + 3 * STEP_BYTES) for n in range(5)]
    # All share the exact part; what tells them apart comes after it.
    shared = b"s" * (EXACT_BYTES + STEP_BYTES)
    texts = [shared + stem + b"%d" % n for n in range(20) for stem in stems]
    planned = [texts[n] for n in order([prefix_key(t) for t in texts])]
    groups = [t[len(shared)] for t in planned]
    assert sum(a != b for a, b in itertools.pairwise(groups)) == len(stems) - 1


@given(st.binary(max_size=64), st.integers(0, 3000), st.binary(max_size=64))
def test_keys_are_equal_for_equal_prompts_and_bounded(head: bytes, middle: int, tail: bytes) -> None:
    prompt = head + b"m" * middle + tail
    key = prefix_key(prompt)
    assert key == prefix_key(bytes(prompt))
    assert key.startswith(prompt[:EXACT_BYTES])
    assert len(key) <= EXACT_BYTES + len(prompt) // STEP_BYTES * 4 + STEP_BYTES


def test_a_key_tells_prompts_apart_that_differ_anywhere() -> None:
    prompt = b"p" * (EXACT_BYTES + 10 * STEP_BYTES + 17)
    keys = {prefix_key(prompt[:n] + b"X" + prompt[n + 1 :]) for n in range(0, len(prompt), 97)}
    assert len(keys) == len(range(0, len(prompt), 97))


@given(
    st.lists(st.tuples(st.sampled_from([b"", b"p", b"q"]), st.integers(-2, 3), st.text("ab", max_size=3)), max_size=60)
)
def test_keys_that_share_their_exact_part_in_memory_sort_as_they_do_apart(given: list[tuple[bytes, int, str]]) -> None:
    """Lengths around those at which a key gets a second part, which those below do not have."""
    texts = [stem * (EXACT_BYTES + more) + end.encode() for stem, more, end in given]
    pieces, costs = Pieces(), [9] * len(texts)
    keys = [prefix_key(text) for text in texts]
    held = [hold_key(key, pieces)[0] for key in keys]
    assert Planner().order(held, texts, costs, costs) == Planner().order(keys, texts, costs, costs)


def test_costs_are_positive_and_fit_the_plan() -> None:
    assert token_cost(0, 0) == 1
    assert token_cost(9, 16) == 3 + 16
    assert token_cost(1, 2**40) == MAX_COST
