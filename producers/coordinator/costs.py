"""What requests really cost, learnt from those that were answered. Pure.

The plan knows how long an answer may be (`max_tokens`), not how long it will be. So each batch has a factor by which
its requests cost more or less than the plan says. Whose turn it is goes by that when they are sent (`packing.charge`),
and is put right once they are answered (`Book`), since short answers come first and long ones are known late. What a
batch has not shown yet is taken from all others of its model version.
"""

from __future__ import annotations

#: Estimated tokens after which what was seen before counts half.
HALF_TOKENS = 1 << 20
#: How much of what was seen a factor needs before it is half of its own, in estimated tokens: some tens of requests.
PRIOR_TOKENS = 1 << 14
#: Factors are kept within this and its inverse: an engine that tells no tokens, or nonsense, upsets nothing.
MOST = 64.0


class Costs:
    """Of one batch, or of a model version."""

    __slots__ = ("_estimated", "_measured", "settled")

    def __init__(self) -> None:
        self._estimated = 0.0
        self._measured = 0.0
        #: What all that is settled was estimated to cost, in tokens.
        self.settled = 0.0

    def add(self, estimated: float, measured: float) -> None:
        """Answers came that were to cost `estimated` tokens, prompt and answer together, and did cost `measured`."""
        if estimated > 0 and measured > 0:
            keep = 0.5 ** (estimated / HALF_TOKENS)
            self._estimated = self._estimated * keep + estimated
            self._measured = self._measured * keep + measured

    def factor(self, otherwise: float = 1.0) -> float:
        """How many times the estimate requests cost; `otherwise`: what to think while little is known."""
        found = (self._measured + otherwise * PRIOR_TOKENS) / (self._estimated + PRIOR_TOKENS)
        return min(MOST, max(1 / MOST, found))
