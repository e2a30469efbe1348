"""The planner's walk through the trie of a window of many rows, by numpy. `small_walk` is the same for few."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from producers import planner
from producers.planner import BYTES_PER_TOKEN, EQUAL, EXACT_BYTES, LEAF, MAX_SHARED, MOST_LEVELS, STEP_BYTES, Walked

_LENGTHS = np.array(planner.LENGTHS)

_Ints = npt.NDArray[np.int64]


def walk(
    blocks: Sequence[int],
    block: int,
    rows: Sequence[int],
    costs: Sequence[int],
    outputs: Sequence[int],
    backwards: bool,
) -> Walked:
    """The rows in the order of the walk.

    `blocks`: of each row in sorted order, the first blocks of `block` bytes that it has in common with the one before
    it; `rows`: which one it is, by its place in `costs` and `outputs` (as `Planner.order` has them).
    """
    writing = np.array(outputs, np.int64)[rows]
    reading = np.array(costs, np.int64)[rows] - writing
    common = _bytes(np.array(blocks, np.int64), block)
    trie = _Trie(common, np.maximum(reading - common // BYTES_PER_TOKEN, 0), writing, backwards)
    found = trie.node(0, len(rows), MOST_LEVELS)
    shared = np.minimum(trie.shared[found], np.minimum(reading[found] * BYTES_PER_TOKEN, MAX_SHARED))
    base = int(shared[1:].min()) if len(rows) > 1 else 0
    return Walked(found.tolist(), np.maximum(shared - base, 0).tolist(), base)


def _bytes(blocks: _Ints, block: int) -> _Ints:
    """`planner.bytes_of`, of many."""
    exact = EXACT_BYTES // block
    size: _Ints = np.minimum(blocks, exact) * block + np.maximum(blocks - exact, 0) * STEP_BYTES
    return size


class _Trie:
    """The trie of a window. Rows are named by their places in the sorted order.

    `common`: bytes that each has in common with the one before it; `reading`, `writing`: tokens of prompt that it adds
    to the ones before it, and of its answer.
    """

    def __init__(self, common: _Ints, reading: _Ints, writing: _Ints, backwards: bool) -> None:
        self._common = common
        self._reading = reading
        self._writing = writing
        self._backwards = backwards
        #: As `common`, after the walk.
        self.shared = common.copy()

    def node(self, start: int, end: int, levels: int) -> _Ints:
        """The rows `[start, end)`, which have a prefix in common, in the order of the walk."""
        rows = np.arange(start, end)
        if end - start <= LEAF or not levels:
            return rows
        inner = self._common[start + 1 : end]
        base = int(inner.min())
        if base >= EQUAL:
            return rows
        borders = 1 + np.flatnonzero(inner == base)
        starts = np.concatenate(([0], borders))
        sizes = np.diff(np.append(starts, end - start))
        writing = np.add.reduceat(self._writing[start:end], starts)
        reading = np.add.reduceat(self._reading[start:end], starts)
        order = _alternate(reading, writing, sizes, self._backwards)
        sizes, starts = sizes[order], starts[order]
        firsts = np.cumsum(sizes) - sizes
        found: _Ints = rows[np.repeat(starts - firsts, sizes) + np.arange(end - start)]
        for child in np.flatnonzero(sizes > LEAF):
            at, first, size = int(firsts[child]), start + int(starts[child]), int(sizes[child])
            found[at : at + size] = self.node(first, first + size, levels - 1)
        self.shared[found[firsts]] = base
        return found


def _alternate(reading: _Ints, writing: _Ints, rows: _Ints, backwards: bool) -> _Ints:
    """The order of a node's children, by their tokens read and written, and how many rows each has.

    Let a child's excess be what it writes beyond the share that writing has in the node as a whole. The next one is
    the next of those that write more than that share, unless the excess so far is above 0: then it is the next of the
    others. So the excess of all so far is never further from 0 than the largest excess of one child, and that of any
    stretch than twice that.
    """
    total = reading + writing
    share = float(writing.sum()) / max(1.0, float(total.sum()))
    excess = np.rint(writing - share * total)
    walk = np.arange(len(rows))[:: -1 if backwards else 1]
    length = np.searchsorted(_LENGTHS, writing / rows, side="right")
    longest_first = walk[np.argsort(-length[walk], kind="stable")]
    writers = longest_first[excess[longest_first] >= 0]
    readers = longest_first[excess[longest_first] < 0]
    # Both kinds by what those before them have come to: the merge of the two is the rule above.
    ahead = np.concatenate([np.cumsum(excess[writers]) - excess[writers], excess[readers] - np.cumsum(excess[readers])])
    merged: _Ints = np.concatenate([writers, readers])[np.argsort(ahead, kind="stable")]
    return merged
