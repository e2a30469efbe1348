"""Ends batches: assembles the outputs of those that are closed, says so, and lets their records go."""

from __future__ import annotations

import functools
import queue
import time

from common.errors import Unreachable
from common.logs import get
from common.store import Store
from producers.batch import Counts, folder
from producers.coordinator import summary
from producers.coordinator.assembler import Assembled, Assembler, MissingRows, Source, Stopped
from producers.coordinator.backoff import Reconnect
from producers.coordinator.batch_files import BatchFiles, DamagedBatch
from producers.coordinator.core import Core, trouble_of
from producers.coordinator.leadership import Leadership
from producers.coordinator.ledger import DiskFull, Reader
from producers.coordinator.progress import Progress
from producers.coordinator.records import Cancelled, Expired, Failed, Finalised, Reopened, Type, encode, pack_positions
from producers.coordinator.status_files import StatusFiles

log = get(__name__)

_STATUS_OF_CUT: dict[type, str] = {Cancelled: "cancelled", Expired: "expired"}


class Finalizer:
    """One thread: `run` until the core stops. `submit` a batch whose `Closed` or `Failed` record is in the ledger."""

    def __init__(self, core: Core, store: Store, leadership: Leadership, files: StatusFiles) -> None:
        self._core = core
        self._files = files
        self._store = store
        self._leadership = leadership
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._known: set[str] = set()

    def submit(self, batch_id: str) -> None:
        """Let a batch be ended; no effect when it is on its way already."""
        if batch_id not in self._known:
            self._known.add(batch_id)
            self._waiting.put(batch_id)

    def run(self) -> None:
        """End batches, one at a time, until the core stops."""
        core = self._core
        while not core.stop.is_set():
            try:
                batch_id = self._waiting.get(timeout=0.5)
            except queue.Empty:
                continue
            if batch_id is None:
                return
            with core.lock:
                progress = core.book.batches.get(batch_id)
            if progress is not None:
                self._end(progress)
            self._known.discard(batch_id)

    def wake(self) -> None:
        """Let `run` see that the core stops."""
        self._waiting.put(None)

    def _end(self, progress: Progress) -> None:
        """End one batch, over and over while the disk is full or the store is away."""
        again = Reconnect()
        while not self._core.stop.is_set():
            try:
                self._attempt(progress)
            except Stopped:
                return
            except (OSError, DiskFull, Unreachable) as exc:
                name = trouble_of(exc)
                log.error("assembly_failed", batch=progress.id, reason=name, error=type(exc).__name__)
                self._core.trouble(name, "finalizer", True)
                self._core.stop.wait(again.failed())
                continue
            break
        for name in ("disk_full", "store_unreachable"):
            self._core.trouble(name, "finalizer", False)

    def _attempt(self, progress: Progress) -> None:
        core = self._core
        if not core.wait_durable(core.ledger.written):
            raise Stopped
        self._leadership.check()
        began = time.monotonic()
        try:
            assembled = self._assemble(progress)
        except MissingRows as missing:
            log.error("rows_reopened", batch=progress.id, rows=len(missing.positions))
            core.while_disk_full(
                functools.partial(core.decide, Reopened(progress.id, pack_positions(missing.positions)))
            )
            return
        except DamagedBatch as damaged:
            log.error("batch_damaged", batch=progress.id, reason=damaged.reason)
            if progress.failure is None:
                core.while_disk_full(functools.partial(core.decide, Failed(progress.id, damaged.reason, time.time())))
                self._attempt(progress)
                return
            assembled = None  # Not even what is answered can be put in order.
        self._leadership.check()
        self._conclude(progress, assembled)
        log.info(
            "batch_ended",
            batch=progress.id,
            status=progress.final,
            requests=progress.batch.requests,
            seconds=round(time.monotonic() - began, 3),
        )

    def _assemble(self, progress: Progress) -> Assembled | None:
        core = self._core
        with core.lock:
            source = Source(
                progress.batch,
                progress.places[:],
                cut=_STATUS_OF_CUT.get(type(progress.cut)),
                partial=progress.failure is not None,
                stop=core.stop.is_set,
            )
        reader = Reader(core.ledger)
        try:
            files = BatchFiles(self._store, progress.batch)
            return Assembler(source, reader, files, core.ledger.folder).to_store(self._store)
        finally:
            reader.close()

    def _conclude(self, progress: Progress, assembled: Assembled | None) -> None:
        core, batch = self._core, progress.batch
        status = "failed" if progress.failure else _STATUS_OF_CUT.get(type(progress.cut), "completed")
        base = folder(batch.id)
        closed_at = progress.closed_at if progress.closed_at is not None else time.time()
        if assembled is not None:
            self._store.put_atomic(
                f"{base}/summary.json",
                summary.encode(
                    batch,
                    status,
                    assembled,
                    progress.usage,
                    progress.started_at,
                    closed_at,
                    progress.resent,
                    progress.duplicates,
                ),
            )
        with core.lock:
            progress.final = status
            said = progress.status()
        if assembled is not None and status != "failed":
            said.request_counts = Counts(batch.requests, assembled.completed, assembled.failed)
        self._files.say(said)
        self._store.delete(f"active/{batch.shard}/{batch.id}")
        self._store.delete(f"control/{batch.id}")
        core.while_disk_full(lambda: core.ledger.append(Type.FINALISED, encode(Finalised(batch.id, status))))
        with core.lock:
            core.book.forget(batch.id)
            core.dirty.discard(batch.id)
        core.ledger.release(batch.id)
        core.dispatch.set()
