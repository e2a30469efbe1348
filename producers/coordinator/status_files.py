"""The status files of batches: written by several threads, the last word never overwritten by an earlier one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from common.errors import Damaged
from common.logs import get
from common.store import Fence, Store
from producers.batch import FINAL, Batch, Status, folder, read_status

log = get(__name__)


class StatusFiles:
    """Writes `batches/<id>/status.json`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()

    def say(self, status: Status, fence: Fence, still: Callable[[str], bool] = lambda _: True) -> bool:
        """Write a status file, unless it is not `still` true of its batch by the time that it is this one's turn."""
        return self.say_all([status], fence, still) == 1

    def say_all(self, statuses: Sequence[Status], fence: Fence, still: Callable[[str], bool] = lambda _: True) -> int:
        """As `say`, of many at once; how many were written. `fence`: see `common.store.Store.group`."""
        with self._lock:
            due = [status for status in statuses if still(status.id)]
            if due:
                with self._store.group(fence) as group:
                    for status in due:
                        status.updated_at = time.time()
                        group.put(f"{folder(status.id)}/status.json", msgspec.json.encode(status))
            return len(due)


def has_ended(store: Store, batch: Batch) -> bool:
    """True when a batch's status is final."""
    try:
        return read_status(store, batch).status in FINAL
    except Damaged:
        # Damaged: it is made anew, and so are the outputs if there were any.
        log.error("status_unreadable", batch=batch.id)
        return False
