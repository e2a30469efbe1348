"""Ends batches: assembles the outputs of those that are closed, says so, and lets their records go.

Small batches are ended in groups, so that ten thousand of them do not wait for the disk ten thousand times; large ones
one at a time on a thread of their own, so that nobody waits for a long assembly. A batch that cannot be ended (its
folder is not writable, the disk is full) is tried again later, by itself, and holds up no other.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import NamedTuple

from common.errors import Unreachable
from common.logs import get, why
from common.store import FileGroup, Store
from producers.batch import Counts, Status, folder
from producers.coordinator import summary
from producers.coordinator.assembler import Assembled, Assembler, MissingRows, Source, Stopped
from producers.coordinator.backoff import Reconnect
from producers.coordinator.batch_files import BatchFiles, DamagedBatch
from producers.coordinator.core import Core, trouble_of
from producers.coordinator.end_queue import EndQueue
from producers.coordinator.leadership import Leadership
from producers.coordinator.ledger import DiskFull, Reader
from producers.coordinator.progress import Progress
from producers.coordinator.records import (
    Failed,
    Finalised,
    Reopened,
    Type,
    encode,
    pack_positions,
)
from producers.coordinator.result_records import KEPT_BYTES, ResultRecords
from producers.coordinator.status_files import StatusFiles

log = get(__name__)

#: Requests from which a batch counts as large.
LARGE = 4096
#: Small batches that are ended together, at most.
TOGETHER = 256


class _Ended(NamedTuple):
    progress: Progress
    status: Status


class Finalizer:
    """Two threads: `run` until the core stops. `submit` a batch whose `Closed` or `Failed` record is in the ledger."""

    def __init__(self, core: Core, store: Store, leadership: Leadership, files: StatusFiles) -> None:
        self._core = core
        self._files = files
        self._store = store
        self._leadership = leadership
        self._small, self._large = EndQueue(), EndQueue()
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._again: dict[str, Reconnect] = {}

    def submit(self, progress: Progress) -> None:
        """Let a batch be ended; no effect when it is on its way already."""
        with self._lock:
            if progress.id in self._known:
                return
            self._known.add(progress.id)
        self._queue_of(progress).put(progress.id)

    def run_small(self) -> None:
        """End small batches, many at a time, until the core stops."""
        self._run(self._small, TOGETHER)

    def run_large(self) -> None:
        """End large batches, one at a time, until the core stops."""
        self._run(self._large, 1)

    def wake(self) -> None:
        """Let both threads see that the core stops."""
        self._small.close()
        self._large.close()

    def _queue_of(self, progress: Progress) -> EndQueue:
        return self._large if progress.batch.requests >= LARGE else self._small

    def _run(self, waiting: EndQueue, most: int) -> None:
        core = self._core
        try:
            while not core.stop.is_set():
                taken = waiting.take(most, 0.5)
                with core.lock:
                    group = [core.book.batches[b] for b in taken if b in core.book.batches]
                if group:
                    self._end(group)
        except Stopped:
            return

    # -- ending ----------------------------------------------------------------------------------------------------

    def _end(self, group: list[Progress]) -> None:
        """End a group of batches; those that cannot be come again later. `Stopped` when the coordinator stops."""
        core = self._core
        if not core.wait_durable(core.ledger.written):
            raise Stopped
        began = time.monotonic()
        ended: list[_Ended] = []
        pending = {progress.id: progress for progress in group}
        try:
            self._leadership.check()
            self._write(pending, ended)
            self._files.say_all([one.status for one in ended], self._leadership.check)
        except (OSError, DiskFull, Unreachable) as exc:
            # Nobody can tell whose fault it is, so each is tried by itself.
            for progress in pending.values():
                self._try_later(progress, exc)
            return
        self._conclude(ended)
        seconds = round(time.monotonic() - began, 3)
        for progress, said in ended:
            log.info(
                "batch_ended",
                batch=progress.id,
                status=said.status,
                requests=progress.batch.requests,
                seconds=seconds,
                together=len(ended),
            )

    def _write(self, pending: dict[str, Progress], ended: list[_Ended]) -> None:
        """Write the output files and summaries; a batch with a trouble of its own is taken out of `pending`."""
        reader = Reader(self._core.ledger, owner=True)
        records = ResultRecords(reader, KEPT_BYTES if len(pending) > 1 else 0)
        try:
            with self._store.group(self._leadership.check) as files:
                for progress in list(pending.values()):
                    try:
                        done = self._write_one(progress, files, records)
                    except (OSError, DiskFull, Unreachable) as exc:
                        files.discard(folder(progress.id))
                        del pending[progress.id]
                        self._try_later(progress, exc)
                        continue
                    if done is None:
                        files.discard(folder(progress.id))
                        del pending[progress.id]
                        with self._lock:
                            self._known.discard(progress.id)
                    else:
                        ended.append(done)
        finally:
            reader.close()

    def _write_one(self, progress: Progress, files: FileGroup, records: ResultRecords) -> _Ended | None:
        """Write one batch's files; None when it is not ended after all."""
        core = self._core
        try:
            assembled = self._assemble(progress, files, records)
        except MissingRows as missing:
            log.error("rows_reopened", batch=progress.id, rows=len(missing.positions))
            core.while_disk_full(
                functools.partial(core.decide, Reopened(progress.id, pack_positions(missing.positions)))
            )
            return None
        except DamagedBatch as damaged:
            files.discard(folder(progress.id))
            log.error("batch_damaged", batch=progress.id, reason=damaged.reason)
            if progress.failure is None:
                core.while_disk_full(functools.partial(core.decide, Failed(progress.id, damaged.reason, time.time())))
                if not core.wait_durable(core.ledger.written):
                    raise Stopped from None
                return self._write_one(progress, files, records)
            assembled = None  # Not even what is answered can be put in order.
        batch = progress.batch
        word = progress.outcome(assembled.missed if assembled is not None else 0)
        if assembled is not None:
            closed_at = progress.closed_at if progress.closed_at is not None else time.time()
            made = summary.encode(
                batch,
                word,
                assembled,
                progress.usage,
                progress.cache,
                progress.started_at,
                closed_at,
                progress.resent,
                progress.duplicates,
            )
            files.put(f"{folder(batch.id)}/summary.json", made)
        with core.lock:
            progress.final = word
            said = progress.status()
        if assembled is not None and word != "failed":
            said.request_counts = Counts(batch.requests, assembled.completed, assembled.failed)
        return _Ended(progress, said)

    def _assemble(self, progress: Progress, group: FileGroup, records: ResultRecords) -> Assembled:
        core = self._core
        with core.lock:
            source = Source(
                progress.batch,
                progress.places[:],
                cut=progress.cut_word,
                partial=progress.failure is not None,
                stop=core.stop.is_set,
            )
        files = BatchFiles(self._store, progress.batch)
        return Assembler(source, records, files, core.ledger.folder).to_group(group)

    def _conclude(self, ended: list[_Ended]) -> None:
        """The final statuses stand: the batches are work no more, and need no records."""
        core = self._core
        # One look for all of them. A command that comes after it is late, and cleared away as such.
        asked = self._asked()
        for progress, said in ended:
            batch = progress.batch
            self._put_away(f"active/{batch.shard}/{batch.id}")
            if batch.id in asked:
                self._put_away(f"control/{batch.id}")
            record = encode(Finalised(batch.id, said.status))
            core.while_disk_full(functools.partial(core.ledger.append, Type.FINALISED, record))
            with core.lock:
                core.book.forget(batch.id)
                core.dirty.discard(batch.id)
            with self._lock:
                self._known.discard(batch.id)
                self._again.pop(batch.id, None)
        core.ledger.release([progress.id for progress, _ in ended])
        core.dispatch.set()

    def _asked(self) -> set[str]:
        """The batches that people asked something of."""
        try:
            return set(self._store.list("control"))
        except (OSError, Unreachable) as exc:
            log.warning("not_listed", path="control", error=why(exc))
            return set()

    def _put_away(self, path: str) -> None:
        """Remove what says that there is work. What stays is removed when a coordinator next looks for work."""
        try:
            self._store.delete(path)
        except (OSError, Unreachable) as exc:
            log.warning("not_removed", path=path, error=why(exc))

    def _try_later(self, progress: Progress, exc: Exception) -> None:
        name = trouble_of(exc)
        log.error("assembly_failed", batch=progress.id, reason=name, error=why(exc))
        with self._lock:
            delay = self._again.setdefault(progress.id, Reconnect()).failed()
        with self._core.lock:
            progress.final = None
            progress.trouble = name
            self._core.dirty.add(progress.id)
        self._core.control.set()
        self._queue_of(progress).put_later(progress.id, delay)
