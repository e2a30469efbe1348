"""Whether this machine answers as well as others do: a sick one must not eat a batch. Pure.

A worker whose requests fail, while another one's do not, is suspected: it stops taking chunks and gives back those it
has. Requests that it failed at go to others, so either those fail too, and then it was the requests: it goes on, as all
do, and they run out of attempts by themselves. Or the others answer them: it was the machine, and the worker ends, to
be started with a new engine. A worker alone is never suspected: nobody could tell the two apart, or take over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum

from common.live import WorkerFacts

#: Seconds that a suspected worker waits for others to fail too, before it ends.
CONFIRM_S = 60.0
#: Seconds in which a worker that went on is not suspected again.
IMMUNE_S = 600.0


class Verdict(Enum):
    """What a worker has to do about its health."""

    STOP = "stop"
    RESUME = "resume"
    END = "end"


class Health:
    """The last outcomes of first attempts, in whole messages. Cached answers say nothing of the machine."""

    def __init__(self, window: int, share: float) -> None:
        """`window`: outcomes looked at, at least. `share` of them failed: suspicious; 0: never."""
        self._window = window
        self._share = share
        self._seen: deque[tuple[int, int]] = deque()
        self.tried = 0
        self._failed = 0
        self._stopped_at = 0.0
        self._immune_until = float("-inf")

    @property
    def failing(self) -> float:
        """Share of the last outcomes that failed, 0 to 1."""
        return self._failed / self.tried if self.tried else 0.0

    @property
    def suspicious(self) -> bool:
        """True when more than the share of enough outcomes failed."""
        enough = self.tried >= self._window and self._failed >= self._window // 2
        return self._share > 0 and enough and self.failing > self._share

    def note(self, good: int, bad: int) -> None:
        """Outcomes of one message."""
        if not good + bad:
            return
        self._seen.append((good, bad))
        self.tried += good + bad
        self._failed += bad
        while self.tried - sum(self._seen[0]) >= self._window:
            first = self._seen.popleft()
            self.tried -= sum(first)
            self._failed -= first[1]

    def judge(self, facts: WorkerFacts, others: Iterable[WorkerFacts], now: float) -> Verdict | None:
        """What to do, given who else is there. `facts` are this worker's own, its state `ready` or `sick`."""
        compared = any(
            other.node != facts.node
            and other.model == facts.model
            and other.state == "ready"
            and other.tried >= self._window // 2
            and other.failing <= self._share / 2
            for other in others
        )
        if facts.state == "sick":
            if not compared:
                self._seen.clear()
                self.tried = self._failed = 0
                self._immune_until = now + IMMUNE_S
                return Verdict.RESUME
            return Verdict.END if now - self._stopped_at >= CONFIRM_S else None
        if self.suspicious and compared and now >= self._immune_until:
            self._stopped_at = now
            return Verdict.STOP
        return None
