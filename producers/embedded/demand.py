"""What is asked of the fleet: unfinished batches in the store, and models that commands asked for."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from pathlib import Path

import msgspec

from common.errors import BatchmillError
from common.store import Store
from producers.batch import Batch
from producers.batch_view import rests
from producers.schedule import waits

#: Seconds between two looks at whether a batch is paused, and batches looked at so at a time.
PAUSED_EVERY_S = 5.0
_PAUSED_AT_ONCE = 50


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
    """Models of the unfinished batches. Reads the names below `active/` and every batch's file once.

    A paused batch counts for nothing: it is in nobody's way, and who lets it go on brings the fleet back. One with a
    deadline needs its coordinator all the same.
    """

    def __init__(self, store: Store, every_s: float) -> None:
        self._store, self._every_s = store, every_s
        self._batches: dict[str, Batch] = {}
        self._counts: Counter[str] = Counter()
        self._next = 0.0
        #: Batch → whether it is paused, and when that was looked at (monotonic seconds).
        self._paused: dict[str, tuple[bool, float]] = {}
        #: As of the last look: model → number of unfinished batches whose hours it is.
        self.due: Counter[str] = Counter()
        #: Model → number of the others: paused, or before or between their hours.
        self.waiting: Counter[str] = Counter()

    def models(self, now: float | None = None) -> Counter[str]:
        """Model → number of unfinished batches; at most one look every `every_s` seconds, at once without `now`."""
        if now is None or now >= self._next:
            if now is not None:
                self._next = now + self._every_s
            self._counts = self._look(sure=now is None)
        return self._counts

    def _look(self, *, sure: bool) -> Counter[str]:
        counts: Counter[str] = Counter()
        due: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        now = now_s()
        alive = set()
        looks = 0
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
                    paused, looked_at = self._paused.get(batch_id, (False, -math.inf))
                    old = time.monotonic() - looked_at >= PAUSED_EVERY_S and looks < _PAUSED_AT_ONCE
                    if old or (sure and paused):
                        looks += 1
                        paused = self._is_paused(known)
                        self._paused[batch_id] = paused, time.monotonic()
                    open_ = not paused and not waits(known.not_before, known.run_between, now)
                    counts[known.model] += not paused or known.expires_at is not None
                    due[known.model] += open_
                    waiting[known.model] += not open_
        self._batches = {b: known for b, known in self._batches.items() if b in alive}
        self._paused = {b: known for b, known in self._paused.items() if b in alive}
        self.due, self.waiting = +due, +waiting
        return +counts

    def _is_paused(self, batch: Batch) -> bool:
        try:
            return rests(self._store, batch)
        except (OSError, BatchmillError):
            return False  # Nobody can say.


def now_s() -> float:
    """Unix seconds, comparable with file times."""
    return time.time()
