"""The status files of batches: written by several threads, the last word never overwritten by an earlier one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from common.store import Store
from producers.batch import Status, folder


class StatusFiles:
    """Writes `batches/<id>/status.json`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()

    def say(self, status: Status, still: Callable[[], bool] = lambda: True) -> bool:
        """Write a status file, unless it is not `still` true by the time that it is this one's turn."""
        with self._lock:
            if not still():
                return False
            status.updated_at = time.time()
            self._store.put_atomic(f"{folder(status.id)}/status.json", msgspec.json.encode(status))
            return True
