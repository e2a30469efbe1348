"""A circuit breaker: after a failure nobody waits again until somebody with time to spare has found the way open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: Seconds between two tries while it is open.
REST_S = 5.0


class Breaker:
    """Thread-safe. Whoever is in a hurry asks `closed`; one thread that is not asks `due`, tries, and says `close`."""

    def __init__(self, rest_s: float = REST_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest_s = rest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._again_at: float | None = None

    @property
    def closed(self) -> bool:
        """True while nothing is known to be wrong."""
        return self._again_at is None

    def due(self) -> bool:
        """True when it is open and time for another try; the next is due a rest later, whatever comes of this one."""
        with self._lock:
            if self._again_at is None or self._clock() < self._again_at:
                return False
            self._again_at = self._clock() + self._rest_s
            return True

    def open(self) -> bool:
        """Something failed; True when it was closed until now."""
        with self._lock:
            was = self._again_at is None
            self._again_at = self._clock() + self._rest_s
            return was

    def close(self) -> None:
        """A try worked."""
        with self._lock:
            self._again_at = None
