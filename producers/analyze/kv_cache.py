"""A simulation of an engine's prefix cache: blocks of tokens, the least recently used go first. Pure.

As in vLLM: only full blocks are shared, found by the hash of a block and all before it; at least one token of a prompt
is always computed; of a finished request the end is given up before the beginning, and its answer before that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class KvCache:
    """Of `blocks` blocks; requests enter one after the other."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        # Hash → how many blocks it stands for: an answer, which nobody shares, is one entry.
        self._held: OrderedDict[int, int] = OrderedDict()
        self._used = 0
        self._answers = 0

    def enter(self, chain: Sequence[int], sharable: int, answer_blocks: int) -> int:
        """A request passes through; how many blocks of its prompt were there.

        `chain`: hashes of the full blocks of its prompt, each of all tokens up to its end; `sharable`: how many of them
        may be found, at most.
        """
        held = self._held
        found = 0
        for block in chain[:sharable]:
            if block not in held:
                break
            found += 1
        if answer_blocks:
            # Below every hash, which are all positive.
            self._answers -= 1
            held[self._answers] = answer_blocks
            self._used += answer_blocks
        for block in reversed(chain):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = 1
                self._used += 1
        while self._used > self._blocks:
            _, size = held.popitem(last=False)
            self._used -= size
        return found
