"""The small cache in front of the Redis one: answers this process has seen lately, least recently used go first."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

#: What an entry takes besides its answer: key, numbers and places in the table.
OVERHEAD = 256


class LocalCache:
    """Thread-safe; holds at most `capacity` bytes, each answer for at most `ttl_s` seconds (None: no limit).

    `generation` changes with every `clear`: who reads it first, and then an answer somewhere else, can `put` that one
    without bringing back what was cleared meanwhile.
    """

    def __init__(self, capacity: int, ttl_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, tuple[bytes, float | None]] = OrderedDict()
        #: Bytes held.
        self.bytes = 0
        self.generation = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> bytes | None:
        """The answer, which is the most recently used one now."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if entry[1] is not None and self._clock() >= entry[1]:
                self._drop(key)
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: bytes, body: bytes, left_s: float | None = None, generation: int | None = None) -> None:
        """Keep an answer, and let go of old ones for it.

        `left_s`: what is left of its time (None: all). `generation`: nothing is kept when it is no longer this one.
        """
        size = len(body) + OVERHEAD
        if size > self._capacity:
            return
        if left_s is None:
            left_s = self._ttl_s
        end = None if left_s is None else self._clock() + left_s
        with self._lock:
            if generation is not None and generation != self.generation:
                return
            if key in self._entries:
                self._drop(key)
            while self.bytes + size > self._capacity:
                self._drop(next(iter(self._entries)))
            self._entries[key] = body, end
            self.bytes += size

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self.bytes = 0
            self.generation += 1

    def drop(self, key: bytes) -> None:
        """Forget an answer."""
        with self._lock:
            if key in self._entries:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        body, _ = self._entries.pop(key)
        self.bytes -= len(body) + OVERHEAD
