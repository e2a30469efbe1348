"""What is asked of the fleet: unfinished batches in the store, and models that commands asked for."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from pathlib import Path

import msgspec

from common.store import Store
from producers.batch import Batch
from producers.schedule import waits


class Wanted(msgspec.Struct, kw_only=True):
    """A command's wish for a worker of `model`; `linger_s` replaces the fleet's own."""

    model: str
    linger_s: float | None = None


def write_wanted(folder: Path, wanted: Wanted) -> None:
    """Ask for a model. The file's time says when."""
    target = folder / f"{wanted.model}.json"
    temporary = folder / f".{wanted.model}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.encode(wanted))
    temporary.replace(target)


def clear_wanted(folder: Path) -> None:
    """Forget the wishes made to a fleet that is gone."""
    for path in folder.iterdir():
        path.unlink(missing_ok=True)


def read_wanted(folder: Path) -> dict[str, tuple[Wanted, float]]:
    """Model → wish and when it was made (Unix seconds)."""
    found = {}
    for path in folder.glob("[!.]*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            wanted = msgspec.json.decode(path.read_bytes(), type=Wanted)
            found[wanted.model] = (wanted, path.stat().st_mtime)
    return found


class ActiveBatches:
    """Models of the unfinished batches. Reads the names below `active/` and every batch's file once."""

    def __init__(self, store: Store, every_s: float) -> None:
        self._store, self._every_s = store, every_s
        self._batches: dict[str, Batch] = {}
        self._counts: Counter[str] = Counter()
        self._next = 0.0
        #: As of the last look: model → number of unfinished batches whose hours it is.
        self.due: Counter[str] = Counter()

    def models(self, now: float | None = None) -> Counter[str]:
        """Model → number of unfinished batches; at most one look every `every_s` seconds, at once without `now`."""
        if now is None or now >= self._next:
            if now is not None:
                self._next = now + self._every_s
            self._counts = self._look()
        return self._counts

    def _look(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        due: Counter[str] = Counter()
        now = now_s()
        alive = set()
        for shard in self._store.list("active"):
            for batch_id in self._store.list(f"active/{shard}"):
                alive.add(batch_id)
                if batch_id not in self._batches:
                    # A file that is missing or unreadable is the coordinator's to report; no worker comes of it.
                    with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
                        raw = self._store.read(f"batches/{batch_id}/batch.json")
                        batch = msgspec.json.decode(raw, type=Batch)
                        self._batches[batch_id] = msgspec.structs.replace(batch, windows=[], metadata={})
                if (known := self._batches.get(batch_id)) is not None:
                    counts[known.model] += 1
                    due[known.model] += not waits(known.not_before, known.run_between, now)
        self._batches = {b: known for b, known in self._batches.items() if b in alive}
        self.due = +due
        return counts


def now_s() -> float:
    """Unix seconds, comparable with file times."""
    return time.time()
