"""The planner: in which order the rows of a window go to the engine, and what each may cost. Pure.

An engine keeps the KV blocks of the prompts it has just seen, so requests that share a prefix must come one after the
other. Walking the trie of all prompts depth-first gives that at every level at once: whatever prefix one looks at, the
rows that have it stand side by side. Sorting the prompts as byte strings *is* that walk, so no trie is built; a key
stands for each prompt, exact at its start and a chain of hashes after that, so that long prompts take little memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from xxhash import xxh3_64_intdigest

#: A window never holds more rows or more bytes of rows than this; all later steps work window by window.
WINDOW_ROWS = 16_384
WINDOW_BYTES = 32 << 20

#: Bytes at a prompt's start that its key holds as they are: any two prompts that part here part at the right byte.
EXACT_BYTES = 1024
#: Bytes a hash of the key stands for after that. A border every 256 bytes (about 64 tokens) is as fine as the blocks
#: of an engine's prefix cache; borders before EXACT_BYTES fall at every byte, so also where short messages end.
STEP_BYTES = 256
_HASH_BYTES = 4

#: What a prompt's bytes come to in tokens, on average over English text and JSON.
BYTES_PER_TOKEN = 4
#: Plans and ledgers keep a cost as u32.
MAX_COST = 2**32 - 1


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


def order(keys: Sequence[bytes], bodies: Sequence[bytes]) -> list[int]:
    """The planned order of a window: positions in `keys`, a permutation.

    Rows whose keys share a prefix stand together; among rows of equal keys, those with equal bodies do; what is equal
    in both keeps its order.
    """
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


def token_cost(prompt_bytes: int, output_tokens: int) -> int:
    """Tokens a request may cost, prompt and answer together; at least 1, at most `MAX_COST`."""
    cost = -(-prompt_bytes // BYTES_PER_TOKEN) + output_tokens
    return cost if 0 < cost <= MAX_COST else max(1, min(cost, MAX_COST))
