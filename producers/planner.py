"""The planner: in which order the rows of a window go to the engine, and what each may cost. Pure.

An engine keeps the KV blocks of the prompts it has just seen, so requests that share a prefix must come one after the
other. Walking the trie of all prompts depth-first gives that at every level at once: whatever prefix one looks at, the
rows that have it stand side by side. Sorting the prompts as byte strings *is* such a walk, so no trie is built; a key
stands for each prompt, exact at its start and a chain of hashes after that, so that long prompts take little memory.

A depth-first walk may take the children of a node in any order, and keeps every prefix together all the same. That
freedom is used three times over:

- Prefill needs an engine's arithmetic, decoding its memory: children that mostly read and children that mostly write
  alternate, so that the share of either stays that of the whole (`_alternate` says how exactly).
- Within both kinds long answers come first, so that no long one is left alone at the end (longest processing time
  first, Graham 1969), in steps of a fifth: what differs by less keeps the order of the walk.
- Windows are walked forwards and backwards in turn, so that the prefixes which an engine saw last in one are those it
  sees first in the next: of the orders that touch everything once a window, the one least recently used likes best.

The trie's edges are blocks of `BLOCK` bytes, and steps of the hash chain after the exact part: what parts inside a
block parts at its beginning, as it does for an engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

#: A window never holds more rows than this, nor more bytes of them in memory (bodies, keys and what each row takes
#: besides); all later steps work window by window. Each window meets every prefix anew, so larger ones save more; these
#: keep `submit` below 150 MB (docs/benchmarks.md).
WINDOW_ROWS = 65_536
WINDOW_BYTES = 80 << 20

#: Bytes at a prompt's start that its key holds as they are: any two prompts that part here part at the right byte.
EXACT_BYTES = 1024
#: Bytes a hash of the key stands for after that. A border every 256 bytes (about 64 tokens) is as fine as the blocks
#: of an engine's prefix cache; borders before EXACT_BYTES fall at every byte, so also where short messages end.
STEP_BYTES = 256
_HASH_BYTES = 4

#: Bytes of a block: some 16 tokens, the smallest that engines share.
BLOCK = 64
#: Stands for blocks, and bytes, that equal keys have in common: more than any others.
_EQUAL = 1 << 40
#: Rows with a prefix in common that stay as sorted, however they differ: an engine has them all at a time.
_LEAF = 32
#: Levels of the trie whose nodes are walked by what their children cost; below them, as sorted.
_MOST_LEVELS = 8
#: Tokens of an answer from which on it counts as longer: four steps to a power of two, so that what differs by chance
#: stays where it is.
_LENGTHS = np.array([round(2 ** (step / 4)) for step in range(4 * 32)])

#: What a prompt's bytes come to in tokens, on average over English text and JSON.
BYTES_PER_TOKEN = 4
#: Plans and ledgers keep a cost as u32.
MAX_COST = 2**32 - 1

_Ints = npt.NDArray[np.int64]


def prefix_key(prompt: bytes) -> bytes:
    """A byte string that sorts as the prompt does, up to the borders described above; equal for equal prompts.

    `prompt`: the parts of a body that make the engine's prompt, in the order in which the engine sees them.
    """
    size = len(prompt)
    if size <= EXACT_BYTES:
        return prompt
    # Each border's hash covers its own step: the bytes before it are compared first, which makes it a chain.
    parts = [prompt[:EXACT_BYTES]]
    last = size - (size - EXACT_BYTES) % STEP_BYTES
    for start in range(EXACT_BYTES, last, STEP_BYTES):
        parts.append((xxh3_64_intdigest(prompt[start : start + STEP_BYTES]) & 0xFFFFFFFF).to_bytes(_HASH_BYTES, "big"))
    parts.append(prompt[last:])
    return b"".join(parts)


class Order(NamedTuple):
    """A window in planned order."""

    #: Positions in what was given, a permutation.
    places: list[int]
    #: Of each row in that order: bytes of prompt that it has in common with the row before it (the first one with the
    #: last of the window before), beyond what all rows of the window have in common; whole blocks only.
    shared: npt.NDArray[np.int64]


class Planner:
    """Orders the windows of one file, one after the other."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._backwards = False
        self._last = b""

    def order(
        self, keys: Sequence[bytes], bodies: Sequence[bytes], costs: Sequence[int], outputs: Sequence[int]
    ) -> Order:
        """The planned order of the next window: the same for the same windows.

        `keys`: by `prefix_key`; `costs`: tokens of prompt and answer together; `outputs`: those of the answer. Among
        rows of equal keys, those with equal bodies stand together; what is equal in both keeps its order.
        """
        if not keys:
            return Order([], np.zeros(0, np.int64))
        sorted_ = _sorted(keys, bodies)
        in_order = list(map(keys.__getitem__, sorted_))
        writing = np.array(outputs, np.int64)[sorted_]
        reading = np.array(costs, np.int64)[sorted_] - writing
        common = self._bytes(_blocks_in_common(in_order, self._block))
        walk = _Walk(common, np.maximum(reading - common // BYTES_PER_TOKEN, 0), writing, self._backwards)
        found = walk.node(0, len(keys), _MOST_LEVELS)
        places = np.array(sorted_)[found].tolist()
        shared = walk.shared[found]
        shared[0] = self._bytes(_blocks_in_common([self._last, in_order[found[0]]], self._block))[1]
        shared = np.minimum(shared, reading[found] * BYTES_PER_TOKEN)
        self._last = keys[places[-1]]
        self._backwards = not self._backwards
        base = int(shared[1:].min()) if len(keys) > 1 else 0
        return Order(places, np.maximum(shared - base, 0))

    def _bytes(self, blocks: _Ints) -> _Ints:
        """Bytes of prompt in so many first blocks."""
        exact = EXACT_BYTES // self._block
        size: _Ints = np.minimum(blocks, exact) * self._block + np.maximum(blocks - exact, 0) * STEP_BYTES
        return size


class _Walk:
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
        if end - start <= _LEAF or not levels:
            return rows
        inner = self._common[start + 1 : end]
        base = int(inner.min())
        if base >= _EQUAL:
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
        for child in np.flatnonzero(sizes > _LEAF):
            at, first, size = int(firsts[child]), start + int(starts[child]), int(sizes[child])
            found[at : at + size] = self.node(first, first + size, levels - 1)
        before = self.shared[start]
        self.shared[found[firsts]] = base
        self.shared[found[0]] = before
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


def _sorted(keys: Sequence[bytes], bodies: Sequence[bytes]) -> list[int]:
    planned = sorted(range(len(keys)), key=keys.__getitem__)
    # Bodies are looked at only where keys are equal, which is rare enough to keep them out of the sort.
    start = 0
    for at, (left, right) in enumerate(pairwise(planned), 1):
        if keys[left] != keys[right]:
            if at - start > 2:
                planned[start:at] = sorted(planned[start:at], key=bodies.__getitem__)
            start = at
    if len(planned) - start > 2:
        planned[start:] = sorted(planned[start:], key=bodies.__getitem__)
    return planned


def _blocks_in_common(keys: Sequence[bytes], block: int) -> _Ints:
    """Whole first blocks that each key has in common with the one before it; 0 for the first one.

    `_EQUAL` for a key that is the same.
    """
    exact = EXACT_BYTES // block

    def end(blocks: int) -> int:
        """Bytes of a key's first blocks."""
        return blocks * block if blocks <= exact else EXACT_BYTES + (blocks - exact) * _HASH_BYTES

    found = [0]
    # Neighbours have about as much in common as the pair before.
    blocks, size, following = 0, 0, end(1)
    for a, b in pairwise(keys):
        if a == b:
            found.append(_EQUAL)
            continue
        if a[:size] != b[:size]:
            blocks = bisect_left(range(blocks), True, key=lambda n: a[: end(n)] != b[: end(n)]) - 1
            size, following = end(blocks), end(blocks + 1)
        while a[size:following] == b[size:following] and len(a) >= following <= len(b):
            blocks += 1
            size, following = following, end(blocks + 1)
        found.append(blocks)
    return np.array(found, np.int64)


def token_cost(prompt_bytes: int, output_tokens: int) -> int:
    """Tokens a request may cost, prompt and answer together; at least 1, at most `MAX_COST`."""
    cost = -(-prompt_bytes // BYTES_PER_TOKEN) + output_tokens
    return cost if 0 < cost <= MAX_COST else max(1, min(cost, MAX_COST))
