"""Row states against a naive model, and their memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import Kind
from producers.coordinator.row_states import PAGE, PagedBits, RowStates

#: Around borders of pages and bytes, where mistakes live.
SIZES = st.sampled_from([1, 7, 8, 9, 63, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 5])


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, int]]]]:
    size = draw(SIZES)
    near = [0, 1, 7, 8, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, size - 1]
    position = st.one_of(st.sampled_from([p for p in near if 0 <= p < size]), st.integers(0, size - 1))
    row = st.tuples(position, st.sampled_from([1, 2, 3]))
    return size, draw(st.lists(st.lists(row, max_size=12), max_size=12))


@given(parts())
@settings(max_examples=300, deadline=None)
def test_merge_agrees_with_a_naive_model(case: tuple[int, list[list[tuple[int, int]]]]) -> None:
    size, messages = case
    rows = RowStates(size)
    model: dict[int, int] = {}
    for message in messages:
        fresh, replaced, retry = [], [], []
        for position, kind in message:
            before = model.get(position)
            fresh.append(before is None and kind in (Kind.OUTPUT, Kind.ERROR))
            replaced.append(before == Kind.ERROR and kind == Kind.OUTPUT)
            retry.append(before is None and kind == Kind.RETRY)
            if fresh[-1] or replaced[-1]:
                model[position] = kind
        positions = np.array([p for p, _ in message], dtype=np.uint32)
        kinds = np.array([k for _, k in message], dtype=np.uint8)
        merge = rows.merge(positions, kinds)
        assert merge.fresh.tolist() == fresh
        assert merge.replaced.tolist() == replaced
        assert merge.retry.tolist() == retry
        assert rows.settled.count == len(model)
        assert rows.failed.count == sum(1 for kind in model.values() if kind == Kind.ERROR)
    touched = np.array(sorted({p for m in messages for p, _ in m}), dtype=np.uint32)
    assert rows.settled.get(touched).tolist() == [int(p) in model for p in touched]


@given(SIZES, st.lists(st.tuples(st.booleans(), st.integers(0, 4 * PAGE), st.integers(1, 2 * PAGE)), max_size=8))
@settings(max_examples=150, deadline=None)
def test_paged_bits_agree_with_an_array(size: int, steps: list[tuple[bool, int, int]]) -> None:
    bits, model = PagedBits(size), np.zeros(size, dtype=np.bool_)
    for add, start, length in steps:
        positions = np.arange(start % size, min(size, start % size + length), dtype=np.uint32)
        (bits.add if add else bits.discard)(positions)
        model[positions] = add
        assert bits.count == int(model.sum())
    assert (bits.span(0, size) == model).all()
    assert (bits.get(np.arange(size, dtype=np.uint32)) == model).all()
    for start in {0, size // 2, size - 1}:
        open_ = np.flatnonzero(~model[start:])
        assert bits.full_until(start) == (start + int(open_[0]) if len(open_) else size)


def test_a_position_outside_the_batch_changes_nothing() -> None:
    rows = RowStates(10)
    with pytest.raises(ValueError, match="position 10 of a batch of 10 rows"):
        rows.merge(np.array([3, 10], dtype=np.uint32), np.array([1, 1], dtype=np.uint8))
    assert rows.settled.count == 0


def test_the_first_of_equal_rows_in_one_part_wins() -> None:
    rows = RowStates(10)
    merge = rows.merge(np.array([3, 3, 3, 4], dtype=np.uint32), np.array([2, 1, 1, 1], dtype=np.uint8))
    assert merge.fresh.tolist() == [True, False, False, True]
    assert merge.replaced.tolist() == [False, True, False, False]
    assert (rows.settled.count, rows.failed.count) == (2, 0)


def test_only_rows_that_are_open_become_errors() -> None:
    rows = RowStates(10)
    rows.merge(np.array([1], dtype=np.uint32), np.array([1], dtype=np.uint8))
    assert rows.settle_failed(np.array([1, 2], dtype=np.uint32)).tolist() == [2]
    assert (rows.settled.count, rows.failed.count) == (2, 1)


def test_memory_is_that_of_the_window_not_of_the_file() -> None:
    size = 1_000_000
    rows = RowStates(size)
    held = 0
    for start in range(0, size, 500):
        positions = np.arange(start, start + 500, dtype=np.uint32)
        rows.merge(positions, np.full(500, 1, dtype=np.uint8))
        held = max(held, rows.settled.pages_held + rows.failed.pages_held)
    assert rows.settled.count == size
    assert held <= 2
    assert rows.settled.pages_held == 0
