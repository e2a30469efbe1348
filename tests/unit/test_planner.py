"""The planner's order: a permutation in which whatever shares a prefix stands together."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from producers.planner import EXACT_BYTES, MAX_COST, STEP_BYTES, order, prefix_key, token_cost

#: Few letters, so that prefixes are shared; many lengths.
prompts = st.lists(st.text("ab", max_size=12).map(str.encode), max_size=40)


@given(prompts)
def test_the_order_is_a_permutation(keys: list[bytes]) -> None:
    assert sorted(order(keys, keys)) == list(range(len(keys)))


@given(prompts)
def test_rows_that_share_any_prefix_stand_together(keys: list[bytes]) -> None:
    planned = [keys[n] for n in order(keys, keys)]
    for prefix in {key[:size] for key in keys for size in range(len(key) + 1)}:
        places = [n for n, key in enumerate(planned) if key.startswith(prefix)]
        assert places == list(range(places[0], places[0] + len(places)))


@given(st.lists(st.tuples(st.sampled_from([b"", b"a", b"b"]), st.sampled_from([b"x", b"y", b"z"])), max_size=30))
def test_equal_rows_stand_together_in_file_order(rows: list[tuple[bytes, bytes]]) -> None:
    planned = order([k for k, _ in rows], [b for _, b in rows])
    for row in set(rows):
        places = [n for n, k in enumerate(planned) if rows[k] == row]
        assert places == list(range(places[0], places[0] + len(places)))
        same = [planned[n] for n in places]
        assert same == sorted(same)


def test_long_prompts_stand_together_by_what_they_share() -> None:
    """Beyond the exact part the key holds hashes; rows of one conversation must still not be torn apart."""
    stems = [bytes([65 + n]) * (EXACT_BYTES + 3 * STEP_BYTES) for n in range(5)]
    # All share the exact part; what tells them apart comes after it.
    shared = b"s" * (EXACT_BYTES + STEP_BYTES)
    texts = [shared + stem + b"%d" % n for n in range(20) for stem in stems]
    planned = [texts[n] for n in order([prefix_key(t) for t in texts], texts)]
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


def test_costs_are_positive_and_fit_the_plan() -> None:
    assert token_cost(0, 0) == 1
    assert token_cost(9, 16) == 3 + 16
    assert token_cost(1, 2**40) == MAX_COST
