"""The planner: in which order the rows of a window go to the engine, and what each may cost. Pure.

An engine keeps the KV blocks of the prompts it has just seen, so requests that share a prefix must come one after the
other. Walking the trie of all prompts depth-first gives that at every level at once: whatever prefix one looks at, the
rows that have it stand side by side. Sorting the prompts as byte strings *is* such a walk, so no trie is built; a key
stands for each prompt, exact at its start and a chain of hashes after that, so that long prompts take little memory.

A depth-first walk may take the children of a node in any order, and keeps every prefix together all the same. That
freedom is used three times over:

- Prefill needs an engine's arithmetic, decoding its memory: children that mostly read and children that mostly write
  alternate, so that the share of either stays that of the whole (`large_walk` says how exactly).
- Within both kinds long answers come first, so that no long one is left alone at the end (longest processing time
  first, Graham 1969), in steps of a fifth: what differs by less keeps the order of the walk.
- Windows are walked forwards and backwards in turn, so that the prefixes which an engine saw last in one are those it
  sees first in the next: of the orders that touch everything once a window, the one least recently used likes best.

The trie's edges are blocks of `BLOCK` bytes, and steps of the hash chain after the exact part: what parts inside a
block parts at its beginning, as it does for an engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from common.pieces import Body, Pieces, whole

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
EQUAL = 1 << 40
#: Rows with a prefix in common that stay as sorted, however they differ: an engine has them all at a time.
LEAF = 32
#: Levels of the trie whose nodes are walked by what their children cost; below them, as sorted.
MOST_LEVELS = 8
#: Tokens of an answer from which on it counts as longer: four steps to a power of two, so that what differs by chance
#: stays where it is.
LENGTHS = [round(2 ** (step / 4)) for step in range(4 * 32)]
#: A window of so many rows is walked without numpy, whose import takes as long as the planning of some 20,000 rows so.
FEW_ROWS = 4096

#: What a prompt's bytes come to in tokens, on average over English text and JSON.
BYTES_PER_TOKEN = 4
#: Plans and ledgers keep a cost, and plans what is shared, as u32.
MAX_COST = MAX_SHARED = 2**32 - 1


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


#: A `prefix_key`, or its exact part and the rest.
Key = bytes | tuple[bytes, bytes]
#: Bytes of memory that the two take besides their own.
_TWO = 104


def hold_key(key: bytes, pieces: Pieces) -> tuple[Key, int]:
    """The key of a row that is to be in memory with others, and how many bytes it takes that were not taken yet."""
    if len(key) <= EXACT_BYTES:
        return key, len(key)
    exact, taken = pieces.share(key[:EXACT_BYTES])
    return (exact, key[EXACT_BYTES:]), taken + len(key) - EXACT_BYTES + _TWO


class Order(NamedTuple):
    """A window in planned order."""

    #: Positions in what was given, a permutation.
    places: list[int]
    #: Of each row in that order: bytes of prompt that it has in common with the row before it (the first one with the
    #: last of the window before), beyond what all rows of the window have in common; whole blocks only.
    shared: list[int]


class Walked(NamedTuple):
    """A walk through the trie of a window."""

    #: Places in the sorted order, as they are walked.
    order: list[int]
    #: As `Order.shared`, of which the first is to be told by who knows the window before.
    shared: list[int]
    #: Bytes that all rows have in common.
    base: int


class Planner:
    """Orders the windows of one file, one after the other."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._backwards = False
        self._last = b""

    def order(self, keys: Sequence[Key], bodies: Sequence[Body], costs: Sequence[int], outputs: Sequence[int]) -> Order:
        """The planned order of the next window: the same for the same windows.

        `keys`: by `prefix_key`, held in any way; `costs`: tokens of prompt and answer together; `outputs`: those of the
        answer. Among rows of equal keys, those with equal bodies stand together; what is equal in both keeps its order.
        """
        if not keys:
            return Order([], [])
        # Here, so that a small file is planned without what only a large one needs.
        if len(keys) <= FEW_ROWS:
            from producers.small_walk import walk
        else:
            from producers.large_walk import walk

        sorted_ = _sorted(keys, bodies)
        blocks = _blocks_in_common(map(whole, map(keys.__getitem__, sorted_)), self._block)
        walked = walk(blocks, self._block, sorted_, costs, outputs, self._backwards)
        places = list(map(sorted_.__getitem__, walked.order))
        first = places[0]
        common = bytes_of(_blocks_in_common([self._last, whole(keys[first])], self._block)[1], self._block)
        common = min(common, (costs[first] - outputs[first]) * BYTES_PER_TOKEN, MAX_SHARED)
        walked.shared[0] = max(common - walked.base, 0)
        self._last = whole(keys[places[-1]])
        self._backwards = not self._backwards
        return Order(places, walked.shared)


def bytes_of(blocks: int, block: int) -> int:
    """Bytes of prompt in so many first blocks of that size."""
    exact = EXACT_BYTES // block
    return min(blocks, exact) * block + max(blocks - exact, 0) * STEP_BYTES


def _comparable(keys: Sequence[Key]) -> Sequence[Any]:
    """The keys, all of one type, which sort as their bytes do: two parts are compared only where the first is full."""
    if not any(isinstance(key, tuple) for key in keys):
        return keys
    return [key if isinstance(key, tuple) else (key, b"") for key in keys]


def _sorted(given: Sequence[Key], bodies: Sequence[Body]) -> list[int]:
    keys = _comparable(given)
    planned = sorted(range(len(keys)), key=keys.__getitem__)

    def digest(n: int) -> bytes:
        return xxh3_128_digest(whole(bodies[n]))

    # Bodies are looked at only where keys are equal, which is rare enough to keep them out of the sort.
    start = 0
    for at, (left, right) in enumerate(pairwise(planned), 1):
        if keys[left] != keys[right]:
            if at - start > 2:
                planned[start:at] = sorted(planned[start:at], key=digest)
            start = at
    if len(planned) - start > 2:
        planned[start:] = sorted(planned[start:], key=digest)
    return planned


def _blocks_in_common(keys: Iterable[bytes], block: int) -> list[int]:
    """Whole first blocks that each key has in common with the one before it; 0 for the first one.

    `EQUAL` for a key that is the same.
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
            found.append(EQUAL)
            continue
        if a[:size] != b[:size]:
            blocks = bisect_left(range(blocks), True, key=lambda n: a[: end(n)] != b[: end(n)]) - 1
            size, following = end(blocks), end(blocks + 1)
        while a[size:following] == b[size:following] and len(a) >= following <= len(b):
            blocks += 1
            size, following = following, end(blocks + 1)
        found.append(blocks)
    return found


def token_cost(prompt_bytes: int, output_tokens: int) -> int:
    """Tokens a request may cost, prompt and answer together; at least 1, at most `MAX_COST`."""
    cost = -(-prompt_bytes // BYTES_PER_TOKEN) + output_tokens
    return cost if 0 < cost <= MAX_COST else max(1, min(cost, MAX_COST))
