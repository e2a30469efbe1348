"""Ends batches before all of it is answered: cancelled ones, and those whose completion window is over.

Both go the same way. The decision (`Cancelled`, `Expired`) says that nothing more is sent; workers are told to abort
what they run; what they had answered is taken in; then `Closed` says that no later result counts, and the assembler
makes error lines of what is open. So outputs and counts follow from the ledger alone, however the race went.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

from common.logs import get
from producers.coordinator.core import Core
from producers.coordinator.progress import Progress
from producers.coordinator.records import Expired

log = get(__name__)

#: Seconds without a result of a batch that is cut after which none is expected any more.
QUIET_S = 10.0


@dataclass(slots=True)
class _Drain:
    """Monotonic seconds."""

    since: float
    #: When the last result came in, and how many there were then.
    heard_at: float
    heard: int
    #: When no worker was seen to hold a chunk of it any more.
    free_at: float | None = None


class Cuts:
    """Used by the control thread alone."""

    def __init__(self, core: Core, lease_s: float) -> None:
        self._core = core
        self._quiet_s = min(QUIET_S, lease_s)
        self._drains: dict[str, _Drain] = {}

    @property
    def draining(self) -> bool:
        """True while a batch that is cut waits for its last results."""
        return bool(self._drains)

    def expire(self, now: float) -> None:
        """Cut the batches whose deadline has passed at `now` (Unix seconds)."""
        core = self._core
        with core.lock:
            dated = [p for p in core.book.batches.values() if p.batch.expires_at is not None]
            due = [p for p in dated if (p.batch.expires_at or 0.0) <= now and p.sendable and not p.complete]
        for progress in due:
            log.info("batch_expired", batch=progress.id)
            decision = Expired(progress.id, progress.next_pos, now)
            if not core.while_disk_full(functools.partial(core.decide, decision)):
                return

    def forget(self, batch_id: str) -> None:
        """The batch is closed."""
        self._drains.pop(batch_id, None)

    def drained(self, progress: Progress) -> bool:
        """True when a batch that is cut has no results to come, or had the time to."""
        core = self._core
        if progress.cut is None:
            return False
        now = time.monotonic()
        with core.lock:
            heard = progress.rows.settled.count + progress.duplicates
            drain = self._drains.get(progress.id)
            if drain is None:
                drain = self._drains[progress.id] = _Drain(now, now, heard)
                core.cancelled.add(progress.id)
                core.look.set()
            if heard != drain.heard:
                drain.heard, drain.heard_at = heard, now
            if now - drain.heard_at > self._quiet_s:
                return True
            mine = [c for c in core.book.out.values() if any(share.batch == progress.id for share in c.shares)]
            if core.looked_at <= drain.since or any(c.leased_at is not None and c.unleased_since is None for c in mine):
                drain.free_at = None
                return False
            if drain.free_at is None:
                drain.free_at = now
            # What was published before a lease went is in the queue by then.
            return not mine or core.results_seen.at > drain.free_at
