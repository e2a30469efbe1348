"""Tells the control loop that batches have come: by the kernel's word where there is one, else by glances."""

from __future__ import annotations

import time

from common.changes import Changes
from common.inotify import NewNames
from common.store import LocalStore, Store
from producers.coordinator.core import Core

#: Seconds between two looks while there is always a reason to.
_PAUSE_S = 0.02
#: Seconds after which the thread that watches looks whether it is to stop.
_WATCH_S = 0.5


class News:
    """Of the markers in `folder`, the active batches of a shard."""

    def __init__(self, core: Core, store: Store, folder: str) -> None:
        self._core = core
        self._store = store
        self._folder = folder
        self._changes = Changes(store, folder)
        #: A batch has come, as `watch` was told.
        self._told = False

    def wait(self, seconds: float) -> bool:
        """Return once there is a reason to look, after `seconds` in any case; True when a batch has come or gone."""
        core, began = self._core, time.monotonic()
        found = self._changes.wait(seconds, core.control.wait)
        # Under load there is always a reason to look; not every result is one.
        core.stop.wait(max(0.0, began + _PAUSE_S - time.monotonic()))
        if self._told:
            self._told, found = False, True
        return found

    def watch(self) -> None:
        """End `wait` when batches come, at that moment; a thread of its own. Without it, glances find them."""
        core = self._core
        while isinstance(self._store, LocalStore) and not core.stop.is_set():
            try:
                with NewNames(self._store.path_text(self._folder)) as names:
                    while not core.stop.is_set():
                        if names.wait(_WATCH_S):
                            self._told = True
                            core.control.set()
                            core.stop.wait(_PAUSE_S)
            except OSError:
                # Not to be had here, or the first batch is to make the folder yet.
                core.stop.wait(_WATCH_S)
