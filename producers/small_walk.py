"""The planner's walk through the trie of a window of few rows, without numpy. `large_walk` is the same for many."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from producers.planner import BYTES_PER_TOKEN, EQUAL, LEAF, LENGTHS, MAX_SHARED, MOST_LEVELS, Walked, bytes_of


def walk(
    blocks: Sequence[int],
    block: int,
    rows: Sequence[int],
    costs: Sequence[int],
    outputs: Sequence[int],
    backwards: bool,
) -> Walked:
    """As `large_walk.walk`."""
    common = [bytes_of(n, block) for n in blocks]
    writing = [outputs[n] for n in rows]
    reading = [costs[n] - outputs[n] for n in rows]
    added = [max(read - size // BYTES_PER_TOKEN, 0) for read, size in zip(reading, common, strict=True)]
    trie = _Trie(common, added, writing, backwards)
    found = trie.node(0, len(rows), MOST_LEVELS)
    shared = [min(trie.shared[n], reading[n] * BYTES_PER_TOKEN, MAX_SHARED) for n in found]
    base = min(shared[1:], default=0)
    return Walked(found, [max(size - base, 0) for size in shared], base)


class _Trie:
    """As that of `large_walk`."""

    def __init__(self, common: list[int], reading: list[int], writing: list[int], backwards: bool) -> None:
        self._common = common
        #: Sums of all rows before each, and of all.
        self._read = [0, *accumulate(reading)]
        self._written = [0, *accumulate(writing)]
        self._backwards = backwards
        self.shared = common.copy()

    def node(self, start: int, end: int, levels: int) -> list[int]:
        if end - start <= LEAF or not levels:
            return list(range(start, end))
        base = min(self._common[start + 1 : end])
        if base >= EQUAL:
            return list(range(start, end))
        starts = [start, *(n for n in range(start + 1, end) if self._common[n] == base)]
        children = list(zip(starts, [*starts[1:], end], strict=True))
        found: list[int] = []
        for first, last in self._alternate(children):
            at = len(found)
            found += self.node(first, last, levels - 1)
            self.shared[found[at]] = base
        return found

    def _alternate(self, children: list[tuple[int, int]]) -> list[tuple[int, int]]:
        read = [self._read[end] - self._read[start] for start, end in children]
        written = [self._written[end] - self._written[start] for start, end in children]
        share = sum(written) / max(1.0, sum(read) + sum(written))
        excess = [round(w - share * (r + w)) for r, w in zip(read, written, strict=True)]
        length = [bisect_right(LENGTHS, w / (e - s)) for w, (s, e) in zip(written, children, strict=True)]
        numbers = range(len(children))[:: -1 if self._backwards else 1]
        longest_first = sorted(numbers, key=lambda n: -length[n])
        ahead: list[tuple[int, int]] = []
        before = 0
        for n in longest_first:
            if excess[n] >= 0:
                ahead.append((before, n))
                before += excess[n]
        before = 0
        for n in longest_first:
            if excess[n] < 0:
                ahead.append((-before, n))
                before += excess[n]
        return [children[n] for _, n in sorted(ahead, key=lambda one: one[0])]
