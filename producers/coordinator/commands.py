"""Folds in what people ask for: files below `control/<batch>/`, each one a `Command`.

The decision is in the ledger, durable, before the file goes: a command is not lost, whatever is killed in between.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

import msgspec

from common.errors import Damaged, UsageError
from common.ids import is_batch_id
from common.logs import get
from common.store import LocalStore, Store
from producers.batch import PRIORITIES, Command, read_batch
from producers.coordinator.core import Core
from producers.coordinator.leadership import Leadership
from producers.coordinator.progress import Progress
from producers.coordinator.records import Cancelled, Decision, Paused, Reprioritised, Resumed
from producers.coordinator.status_files import has_ended

log = get(__name__)


class Refusal(Exception):
    """The command cannot be obeyed; the text says why."""


def decision(command: Command, progress: Progress, now: float) -> Decision | None:
    """What a command means for a batch at `now` (Unix seconds); None: nothing that is not so already. Pure.

    `Refusal` for what this version does not know.
    """
    match command.command:
        case "cancel":
            made: Decision = Cancelled(progress.id, progress.next_pos, now)
            change = True
        case "pause":
            made, change = Paused(progress.id, now), not progress.paused
        case "resume":
            made, change = Resumed(progress.id, now), progress.paused
        case "reprioritize":
            if command.priority not in PRIORITIES:
                raise Refusal(f"'{command.priority}' is not one of {', '.join(PRIORITIES)}")
            made = Reprioritised(progress.id, command.priority, now)
            change = progress.priority != command.priority
        case other:
            raise Refusal(f"'{other}' is no command of this version: cancel, pause, resume or reprioritize")
    return made if change and progress.sendable else None


class Commands:
    """The commands of one shard's batches. Used by the control thread alone."""

    def __init__(
        self,
        core: Core,
        store: Store,
        leadership: Leadership,
        apart: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        """`apart(batch)` contains the trouble of one batch's files."""
        self._core = core
        self._store = store
        self._leadership = leadership
        self._apart = apart
        #: With an object store, commands that were obeyed: their records may be lost with this host, so they stay until
        #: their batch has ended, and whoever leads next obeys them again, in order, which changes nothing.
        self._obeyed: set[str] | None = None if isinstance(store, LocalStore) else set()

    def fold(self) -> None:
        """Obey what is there for open batches, in the order in which it was asked."""
        core = self._core
        for batch_id in self._store.list("control"):
            with core.lock:
                progress = core.book.batches.get(batch_id)
            if progress is None:
                continue
            with self._apart(batch_id):
                if not self._fold_one(progress):
                    return

    def clear_late(self) -> None:
        """Put away commands that came too late for their batch."""
        if self._obeyed is not None:
            self._obeyed = {path for path in self._obeyed if path.split("/")[1] in self._core.book.batches}
        for batch_id in self._store.list("control"):
            if batch_id in self._core.book.batches or not is_batch_id(batch_id):
                continue
            try:
                batch = read_batch(self._store, batch_id)
            except (UsageError, Damaged):
                continue
            if batch.shard == self._core.shard and has_ended(self._store, batch):
                self._store.delete(f"control/{batch_id}")

    def _fold_one(self, progress: Progress) -> bool:
        """Obey what is asked of one batch; False when the coordinator stops meanwhile."""
        for name in self._store.list(f"control/{progress.id}"):
            path = f"control/{progress.id}/{name}"
            if self._obeyed is not None and path in self._obeyed:
                continue
            try:
                command = msgspec.json.decode(self._store.read(path), type=Command)
            except FileNotFoundError:
                continue
            except msgspec.DecodeError:
                log.error("command_unreadable", batch=progress.id, file=name)
                self._store.delete(path)
                continue
            if not self._obey(progress, command):
                return False
            if self._obeyed is not None:
                self._obeyed.add(path)
                continue
            # Between the decision and this: a record that a later leader does not count must not cost the command.
            self._leadership.check()
            self._store.delete(path)
        return True

    def _obey(self, progress: Progress, command: Command) -> bool:
        """False when the coordinator stops before the decision is safe."""
        core = self._core
        try:
            with core.lock:
                made = decision(command, progress, time.time())
        except Refusal as refusal:
            log.error("command_refused", batch=progress.id, reason=str(refusal))
            return True
        if made is None:
            return True
        log.info("command_obeyed", batch=progress.id, command=command.command, by=command.by)
        if not core.while_disk_full(functools.partial(core.decide, made)):
            return False
        # The file is deleted next: the decision must not be lost with the page cache.
        return core.wait_durable(core.ledger.written)
