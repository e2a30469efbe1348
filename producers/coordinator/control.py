"""Looks for new batches, commands and deadlines, closes what is complete, and says where every batch stands."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator

from common import metrics
from common.errors import BatchmillError, Damaged, Unreachable
from common.logs import get, why
from common.messages import CacheFacts
from common.store import LocalStore, Store
from producers.batch import Batch, Status, folder, read_batch
from producers.coordinator.commands import Commands
from producers.coordinator.core import Core, trouble_of
from producers.coordinator.cuts import Cuts
from producers.coordinator.finalizer import LARGE, Finalizer
from producers.coordinator.leadership import Leadership
from producers.coordinator.news import News
from producers.coordinator.progress import Progress
from producers.coordinator.records import Closed
from producers.coordinator.status_files import StatusFiles, has_ended
from producers.intake import recover
from producers.schedule import run_window

log = get(__name__)

#: Seconds between looks for new work (an object store bills every look).
PERIOD_S = 0.2
PERIOD_OBJECT_STORE_S = 2.0
MOST_PERIOD_S = 2.0
#: Seconds between looks for batches whose submit was killed just before their marker.
RECOVER_S = 60.0
#: Seconds between two status files of a batch whose status word did not change.
STATUS_S = 1.0
#: Seconds between two rounds of status files while many batches run, and files of a round.
_SAY_S = 0.5
_AT_ONCE = 64
#: Batches whose status is written as soon as it changes.
_FEW = 8
#: Seconds for which a batch is left alone whose files made trouble.
TROUBLED_S = 5.0
#: Batches that are gone of which something is remembered, at most.
_SPARE = 1024
_NEVER: tuple[float, str, str | None] = (float("-inf"), "", None)
#: Reasons shown beside a status, the gravest first.
_REASONS = ("disk_full", "store_unreachable", "broker_unreachable", "broker_memory", "state_unreachable")


class Control:
    """One thread: `run` until the core stops."""

    def __init__(
        self,
        core: Core,
        store: Store,
        leadership: Leadership,
        finalizer: Finalizer,
        files: StatusFiles,
        lease_s: float,
    ) -> None:
        self._core = core
        self._store = store
        self._leadership = leadership
        self._finalizer = finalizer
        self._files = files
        self._commands = Commands(core, store, leadership, self._apart)
        self._cuts = Cuts(core, lease_s)
        self._period = PERIOD_S if isinstance(store, LocalStore) else PERIOD_OBJECT_STORE_S
        self._active = f"active/{core.shard}"
        #: batch → (monotonic seconds, word and reason) of its last status file.
        self._said: dict[str, tuple[float, str, str | None]] = {}
        #: Batches taken up since commands were last folded in.
        self._fresh: set[str] = set()
        #: Markers that were complained about already.
        self._odd: set[str] = set()
        #: batch → monotonic seconds until which it is left alone, since its files made trouble that is its own.
        self._troubled: dict[str, float] = {}
        self._said_at = float("-inf")
        #: Batches that wait for their hours.
        self._asleep: set[str] = set()
        #: Models whose gauge was set.
        self._gauged: set[str] = set()
        #: What tells of batches that come.
        self.news = News(core, store, self._active)
        #: One has come or gone since the last look.
        self._new = False
        self._looked_at = float("-inf")
        self._look_again_s = 0.0
        self._recovered_at = float("-inf")

    def run(self) -> None:
        """Tick until the core stops."""
        core = self._core
        while not core.stop.is_set():
            core.control.clear()
            try:
                self.tick()
            except (OSError, Unreachable) as exc:
                log.error("store_trouble", error=why(exc))
                core.trouble(trouble_of(exc), "control", True)
                core.stop.wait(0.5)
            else:
                for name in ("store_unreachable", "disk_full"):
                    core.trouble(name, "control", False)
            self._new |= self.news.wait(0.05 if self._cuts.draining else self._period)

    def tick(self) -> None:
        """One look."""
        now = time.monotonic()
        if now - self._recovered_at >= RECOVER_S:
            if self._recovered_at < 0:
                self._store.sweep("keys", dead_only=True)
            self._store.sweep(self._active, dead_only=True)
            self._recovered_at = now
            recover(self._store)
            self._commands.clear_late()
        # Of very many batches, those that nothing is known to have happened to are looked at less often.
        everything = now - self._looked_at >= max(0.0 if self._new else self._period, self._look_again_s)
        if everything:
            self._looked_at, self._new = now, False
            self.open_new()
            # With very many batches a look takes a while: a twentieth of the time, at most.
            self._look_again_s = min(MOST_PERIOD_S, 20 * (time.monotonic() - now))
            self._commands.fold()
            self._release_new()
            self._cuts.expire(time.time())
            self._note_schedules(time.time())
        self._close_complete(everything or self._cuts.draining)
        self.say_all()
        self._forget()
        self._gauge()

    @contextlib.contextmanager
    def _apart(self, batch_id: str) -> Iterator[None]:
        """A trouble with one batch's files holds up no other batch; one with the store as a whole goes through."""
        try:
            yield
        except (OSError, Unreachable) as exc:
            if not self._store_works():
                raise
            log.error("batch_trouble", batch=batch_id, error=why(exc))
            self._troubled[batch_id] = time.monotonic() + TROUBLED_S

    def _store_works(self) -> bool:
        try:
            self._leadership.beat()
        except (OSError, Unreachable):
            return False
        return True

    def _left_alone(self, batch_id: str) -> bool:
        until = self._troubled.get(batch_id)
        if until is None:
            return False
        if time.monotonic() < until:
            return True
        del self._troubled[batch_id]
        return False

    def _forget(self) -> None:
        """Drop what is known of batches that are gone; now and then, for there may be very many."""
        with self._core.lock:
            open_ = self._core.book.batches.keys()
            if len(self._said) > 2 * len(open_) + _SPARE:
                self._said = {b: said for b, said in self._said.items() if b in open_}
        if len(self._troubled) > _SPARE:
            now = time.monotonic()
            self._troubled = {b: until for b, until in self._troubled.items() if until > now}

    def _gauge(self) -> None:
        book = self._core.book
        with self._core.lock:
            metrics.BATCHES_ACTIVE.set(len(book.batches))
            used = {model: book.window_used(lane) for model, lane in book.lanes.items()}
        for model in self._gauged - used.keys():
            metrics.REQUESTS_IN_FLIGHT.labels(model=model).set(0)
        self._gauged |= used.keys()
        for model, requests in used.items():
            metrics.REQUESTS_IN_FLIGHT.labels(model=model).set(requests)

    # -- new batches -----------------------------------------------------------------------------------------------

    def open_new(self) -> None:
        """Take up batches whose marker is new."""
        core = self._core
        names = self._store.list(self._active)
        self._odd &= set(names)
        for batch_id in names:
            if batch_id in core.book.batches or batch_id in self._odd or self._left_alone(batch_id):
                continue
            batch = None
            with self._apart(batch_id):
                batch = self._read(batch_id)
            if batch is None:
                continue
            try:
                with core.lock:
                    core.book.open(batch).fresh = True
                    core.dirty.add(batch.id)
            except (BatchmillError, ValueError, OverflowError, MemoryError) as exc:
                self._refuse(batch_id, exc)
                continue
            self._fresh.add(batch.id)
            log.info("batch_opened", batch=batch.id, requests=batch.requests, model=batch.model)

    def _release_new(self) -> None:
        """Let rows of new batches out, now that what was asked of them before is known."""
        core = self._core
        if self._fresh:
            with core.lock:
                for progress in filter(None, map(core.book.batches.get, self._fresh)):
                    progress.fresh = False
            self._fresh.clear()
            core.dispatch.set()

    def _read(self, batch_id: str) -> Batch | None:
        """The batch of a marker; None when it has ended or cannot be read."""
        try:
            batch = read_batch(self._store, batch_id)
            if batch.run_between is not None:
                run_window(batch.run_between)
        except Unreachable:
            raise
        except BatchmillError as exc:
            self._refuse(batch_id, exc)
            return None
        if has_ended(self._store, batch):
            # The coordinator ended between the last status and this.
            self._store.delete(f"{self._active}/{batch_id}")
            return None
        # From here on this coordinator writes there: an earlier one that hangs in the middle of it then fails.
        self._store.sweep(folder(batch_id))
        return batch

    def _refuse(self, batch_id: str, exc: Exception) -> None:
        """End a batch whose `batch.json` cannot be worked with: it holds up no other."""
        self._odd.add(batch_id)
        log.error("batch_unreadable", batch=batch_id, error=why(exc))
        with self._apart(batch_id):
            self._fail_unreadable(batch_id, exc)

    def _fail_unreadable(self, batch_id: str, exc: Exception) -> None:
        try:
            base = folder(batch_id)
        except BatchmillError:
            return  # No batch id: somebody else's file.
        if not self._store.exists(base):
            return  # Nothing there to write into; it may still be on its way.
        said = str(exc) if isinstance(exc, BatchmillError) else type(exc).__name__
        reason = (
            said if isinstance(exc, Damaged) else f"{base}/batch.json: cannot be read ({said}); submit the file again"
        )
        now = time.time()
        status = Status(id=batch_id, status="failed", reason=reason, created_at=now, finished_at=now)
        self._files.say(status, self._leadership.check)
        self._store.delete(f"{self._active}/{batch_id}")

    # -- closing ---------------------------------------------------------------------------------------------------

    def _close_complete(self, everything: bool) -> None:
        core = self._core
        with core.lock:
            ending, core.ending = core.ending, set()
            known = core.book.batches
            batches = list(known.values()) if everything else [known[b] for b in ending if b in known]
        for progress in batches:
            if progress.closed_at is not None:
                if progress.final is None:
                    self._finalizer.submit(progress)
            elif progress.complete or self._cuts.drained(progress):
                decision = Closed(progress.id, time.time(), self._cache_of(progress))
                if not core.while_disk_full(functools.partial(core.decide, decision)):
                    return
                self._cuts.forget(progress.id)
                self._finalizer.submit(progress)

    # -- status ----------------------------------------------------------------------------------------------------

    def _note_schedules(self, now: float) -> None:
        """Make due the status of batches whose hours begin or end at `now` (Unix seconds)."""
        core = self._core
        with core.lock:
            for progress in core.book.batches.values():
                if progress.scheduled and progress.final is None:
                    waits = progress.opens(now) > now
                    if waits != (progress.id in self._asleep):
                        self._asleep ^= {progress.id}
                        core.dirty.add(progress.id)
            self._asleep &= core.book.batches.keys()

    def say_all(self, *, last: bool = False) -> None:
        """Write the status files that are due; all that are out of date when this is the `last` time."""
        core = self._core
        now = time.monotonic()
        if not last and now - self._said_at < _SAY_S and len(core.dirty) > _FEW:
            return
        self._said_at = now
        with core.lock:
            due: list[Status] = []
            for batch_id in sorted(core.dirty, key=lambda b: self._said.get(b, _NEVER)[0]):
                progress = core.book.batches.get(batch_id)
                if progress is None:
                    core.dirty.discard(batch_id)
                    self._said.pop(batch_id, None)
                elif progress.final is None and (last or not self._waits(progress)):
                    status = progress.status()
                    if status.cache is None:
                        status.cache = self._cache_of(progress)
                    if status.reason is None:
                        status.reason = self._reason(progress)
                    if status.reason == "scheduled":
                        status.opens_at = progress.opens(time.time())
                    if last or self._is_due(progress, status, now):
                        due.append(status)
                        # Here, where the status was read: what changes from now on makes it dirty again.
                        core.dirty.discard(batch_id)
                        if len(due) >= _AT_ONCE and not last:
                            break
        if due:
            self._say(due, now)

    def _cache_of(self, progress: Progress) -> CacheFacts | None:
        """The result cache as the workers of a batch that uses it last saw it.

        Its results tell of it; before there are any, what workers announce does, which may be a while old.
        """
        if progress.batch.cache == "off":
            return None
        if progress.cache_seen is not None:
            return progress.cache_seen
        seen = (w.cache for w in self._core.workers or () if w.model == progress.batch.model)
        return next((cache for cache in seen if cache is not None), None)

    def _waits(self, progress: Progress) -> bool:
        """True when nothing is said of a batch now, whatever has changed."""
        if self._left_alone(progress.id):
            return True
        # The last word on a small batch follows at once.
        ending = progress.closed_at is not None and progress.batch.requests < LARGE and progress.trouble is None
        return ending and time.time() - (progress.closed_at or 0.0) < STATUS_S

    def _is_due(self, progress: Progress, status: Status, now: float) -> bool:
        at, word, reason = self._said.get(progress.id, _NEVER)
        return (word, reason) != (status.status, status.reason) or now - at >= STATUS_S

    def _say(self, due: list[Status], now: float) -> None:
        core = self._core
        try:
            self._files.say_all(due, self._leadership.check, self._is_open)
        except (OSError, Unreachable):
            with core.lock:
                core.dirty.update(status.id for status in due)
            if not self._store_works():
                raise
            for status in due:
                # One of them has a trouble of its own.
                with self._apart(status.id):
                    self._files.say(status, self._leadership.check, self._is_open)
                    core.dirty.discard(status.id)
        for status in due:
            self._said[status.id] = (now, status.status, status.reason)

    def _is_open(self, batch_id: str) -> bool:
        with self._core.lock:
            progress = self._core.book.batches.get(batch_id)
            return progress is not None and progress.final is None

    def _reason(self, progress: Progress) -> str | None:
        core = self._core
        for name in _REASONS:
            if name in core.troubles:
                return name
        if not progress.sendable:
            return None
        if progress.paused:
            return "paused"
        now = time.time()
        if progress.opens(now) > now:
            return "scheduled"
        if core.workers is None:
            return None
        states = {w.state for w in core.workers if w.model == progress.batch.model}
        if not states:
            return "no_workers"
        if states == {"loading"}:
            return "loading_model"
        return "workers_sick" if "sick" in states and "ready" not in states else None
