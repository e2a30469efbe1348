"""Waiting for a change in a store: noticed within moments on a local disk, at the next look elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from common.store import LocalStore, Store

#: Seconds between two glances at a local disk, at most; one is a `stat` of some microseconds.
GLANCE_S = 0.04
#: The same as a share of the time since a `Changes` was made, and seconds at least: short waits are not made long.
_SHARE = 0.1
_LEAST_S = 0.002


class Changes:
    """Whether files or folders of a store were replaced, or a folder's entries changed. Reads none of them."""

    def __init__(self, store: Store, *paths: str) -> None:
        self._paths = [store.path_text(path) for path in paths] if isinstance(store, LocalStore) else []
        self._seen = self._stamps()
        self._began = time.monotonic()

    def noticed(self) -> bool:
        """True when something changed since this was last asked; never, where only a look can tell."""
        stamps = self._stamps()
        changed = stamps != self._seen
        self._seen = stamps
        return changed

    def wait(self, seconds: float, enough: Callable[[float], object] = time.sleep) -> bool:
        """Return, with True, once something changed; after `seconds` in any case.

        `enough` waits so many seconds, and may end the wait by returning something true.
        """
        if not self._paths:
            enough(seconds)
            return False
        deadline = time.monotonic() + seconds
        while not self.noticed():
            now = time.monotonic()
            left = deadline - now
            glance = min(GLANCE_S, max(_LEAST_S, _SHARE * (now - self._began)))
            if left <= 0 or enough(min(glance, left)):
                # What comes about while somebody ends the wait is noticed at the next one.
                return False
        return True

    def _stamps(self) -> list[tuple[int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
