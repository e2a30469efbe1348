"""Which batches wait for their end: those that can be ended now, and those that wait for another attempt."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable


class EndQueue:
    """Thread-safe; batches are put in by one thread and taken by another."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._ready: deque[str] = deque()
        self._later: list[tuple[float, str]] = []
        #: Batches that are not taken together with others, since an attempt of them has failed.
        self._alone: set[str] = set()
        self._closed = False

    def put(self, batch_id: str) -> None:
        """A batch that can be ended at once."""
        with self._changed:
            self._ready.append(batch_id)
            self._changed.notify()

    def put_later(self, batch_id: str, delay_s: float) -> None:
        """A batch whose end failed: it comes again after a while, by itself."""
        with self._changed:
            self._alone.add(batch_id)
            heapq.heappush(self._later, (self._clock() + delay_s, batch_id))
            self._changed.notify()

    def take(self, most: int, timeout_s: float) -> list[str]:
        """At most `most` batches, the longest-waiting ones; none when the time is up or the queue closed."""
        deadline = self._clock() + timeout_s
        with self._changed:
            while not self._closed:
                now = self._clock()
                while self._later and self._later[0][0] <= now:
                    self._ready.append(heapq.heappop(self._later)[1])
                if self._ready:
                    return self._group(most)
                if now >= deadline:
                    return []
                until = min(deadline, self._later[0][0]) if self._later else deadline
                self._changed.wait(until - now)
        return []

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _group(self, most: int) -> list[str]:
        first = self._ready.popleft()
        if first in self._alone:
            self._alone.discard(first)
            return [first]
        group = [first]
        while self._ready and len(group) < most and self._ready[0] not in self._alone:
            group.append(self._ready.popleft())
        return group
