"""Up to which moment every result that had been published is taken in.

A chunk whose lease is gone may simply be done, its last results still waiting. A busy fleet's results queue is never
seen empty, so that alone would hide losses; a queue is first in, first out, so what stands in it now is taken in once
as many messages have been.
"""

from __future__ import annotations

import threading


class ResultsSeen:
    """`at` only grows. Thread-safe. `slack`: messages that may be on the wire, in no count."""

    def __init__(self, slack: int) -> None:
        #: Monotonic seconds; what was published before is taken in.
        self.at = 0.0
        self._slack = slack
        self._arrived = 0
        self._taken = 0
        self._mark: tuple[int, float] | None = None
        self._lock = threading.Lock()

    def arrived(self) -> None:
        """A message came from the broker."""
        with self._lock:
            self._arrived += 1

    def took(self) -> None:
        """A message was taken in, in the order they arrived."""
        with self._lock:
            self._taken += 1
            if self._mark is not None and self._taken >= self._mark[0]:
                self.at, self._mark = max(self.at, self._mark[1]), None

    def asked(self, now: float, waiting: int) -> None:
        """At `now` or later, this many messages waited in the queue."""
        with self._lock:
            if self._mark is not None:
                return
            if self._taken == self._arrived and not waiting:
                self.at = max(self.at, now)
                return
            self._mark = self._arrived + waiting + (self._slack if waiting else 0), now

    def idle(self, now: float) -> None:
        """Nothing came for a while: the queue is empty."""
        with self._lock:
            self.at, self._mark = max(self.at, now), None

    def again(self) -> None:
        """A new connection: what had arrived and was not acknowledged comes once more."""
        with self._lock:
            self._arrived, self._mark = self._taken, None
