"""With an object store: copies of the ledger's segments in it, so that the log outlives the host that it lies on.

Below `wal/<shard>/`: each segment once nothing more is appended to it (it rolls by size, and after `store.wal_copy_s`
when there is something new), and the leaders' manifests. What was not copied when a host is lost is sent again. A local
folder as store needs none of this: the ledger lies in it, or on a disk that is as safe.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from common.errors import Unreachable
from common.logs import get, why
from common.store import Store, sync_folder
from producers.coordinator import manifest, segments
from producers.coordinator.core import Core, trouble_of
from producers.coordinator.leadership import Leadership

log = get(__name__)

_BLOCK = 4 << 20


def fetch(store: Store, shard: int, folder: Path) -> int:
    """Bring segments and manifests that this host does not have into the ledger's folder; how many.

    To be called by the leader before it reads its ledger.
    """
    base, there = f"wal/{shard}", set(os.listdir(folder))
    wanted = [name for name in store.list(base) if name not in there and _is_ours(name)]
    for name in wanted:
        temporary = folder / f".tmp-{name}-{os.getpid()}"
        try:
            with store.open_read(f"{base}/{name}") as source, open(temporary, "wb", opener=_private) as target:
                while block := source.read(_BLOCK):
                    target.write(block)
                target.flush()
                os.fsync(target.fileno())
        except FileNotFoundError:
            # An earlier leader, not yet aware of this one, needed it no more.
            temporary.unlink(missing_ok=True)
            continue
        temporary.replace(folder / name)
    if wanted:
        sync_folder(folder)
        log.info("log_fetched", shard=shard, files=len(wanted))
    return len(wanted)


class LogCopies:
    """One thread: `run` until the core stops, then `finish`."""

    def __init__(self, core: Core, store: Store, leadership: Leadership, every_s: float) -> None:
        self._core = core
        self._store = store
        self._leadership = leadership
        self._every_s = every_s
        self._base = f"wal/{core.shard}"
        #: Files below `wal/<shard>/`, as far as this leader knows.
        self._there: set[str] = set()

    def begin(self) -> None:
        """Put this leader's manifest into the store; before anything of its own counts."""
        self._there = {name for name in self._store.list(self._base) if _is_ours(name)}
        name = manifest.path_of(self._core.ledger.folder, self._core.epoch).name
        with self._store.group(self._leadership.check) as group:
            group.put(f"{self._base}/{name}", (self._core.ledger.folder / name).read_bytes())
        self._there.add(name)

    def run(self) -> None:
        """Copy what is complete, and remove what is needed no more, until the core stops."""
        core = self._core
        rolled_at, rolled = time.monotonic(), core.ledger.written
        while not core.stop.wait(min(1.0, self._every_s)):
            now = time.monotonic()
            if now - rolled_at >= self._every_s and core.ledger.written > rolled:
                rolled_at, rolled = now, core.ledger.written
                core.ledger.complete()
            try:
                self._look()
            except (OSError, Unreachable) as exc:
                log.error("log_not_copied", error=why(exc))
                core.trouble(trouble_of(exc), "copies", True)
            else:
                for name in ("store_unreachable", "disk_full"):
                    core.trouble(name, "copies", False)

    def finish(self) -> None:
        """At a clean end: whoever leads next, on whatever host, has all of it."""
        self._core.ledger.complete()
        self._look()

    def _look(self) -> None:
        ledger = self._core.ledger
        kept = ledger.completed()
        for name, length in kept.items():
            if name not in self._there:
                with contextlib.suppress(FileNotFoundError):  # needed no more, since a moment ago
                    self._copy(ledger.folder / name, length)
                    self._there.add(name)
        gone = [n for n in self._there if segments.parse_name(n) and n not in kept]
        gone += [n for n in self._there if (epoch := manifest.epoch_of(n)) is not None and epoch < self._core.epoch]
        if gone:
            self._leadership.check()
        for name in gone:
            self._store.delete(f"{self._base}/{name}")
            self._there.discard(name)

    def _copy(self, path: Path, length: int) -> None:
        with open(path, "rb") as source, self._store.group(self._leadership.check) as group:
            with group.open_write(f"{self._base}/{path.name}") as target:
                while length > 0 and (block := source.read(min(_BLOCK, length))):
                    target.write(block)
                    length -= len(block)


def _is_ours(name: str) -> bool:
    return segments.parse_name(name) is not None or manifest.epoch_of(name) is not None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
