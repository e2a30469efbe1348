"""What is answered so far of a batch that runs: reads the ledger beside its coordinator, and changes nothing.

The coordinator logs before it tells, so a ledger that holds less than the batch's status says is not the one that the
coordinator writes.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from common.errors import BatchmillError, UsageError
from common.new_file import replacing
from common.settings import Settings
from common.store import Store
from producers import outputs
from producers.batch import FINAL, Batch, read_batch, read_status
from producers.batch_view import BatchView, heartbeat
from producers.coordinator import segments
from producers.coordinator.assembler import Assembler, Source
from producers.coordinator.batch_files import BatchFiles, DamagedBatch
from producers.coordinator.ledger import OFFSET_BITS, Reader
from producers.coordinator.records import Exhausted, Type, decode
from producers.coordinator.result_records import ResultRecords
from producers.coordinator.segments import Record
from producers.coordinator.service import ledger_folder
from producers.outputs import ERRORS, OUTPUT, Outputs


class Snapshot:
    """The ledger as it stands, as far as one batch is concerned; what `Reader` needs of a ledger."""

    def __init__(self, folder: Path, batch_id: str) -> None:
        #: Places of the records that the assembler needs.
        self.places = array("Q")
        self._paths: list[Path] = []
        needle = batch_id.encode()
        try:
            names = sorted(filter(None, map(segments.parse_name, os.listdir(folder))))
        except OSError:
            names = []
        for name in names:
            path = folder / str(name)
            try:
                fd = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue  # Dropped since it was listed, so no open batch needs it.
            try:
                self._scan(fd, path, needle)
            finally:
                os.close(fd)

    def path_of(self, ordinal: int) -> Path:
        """The file of a segment."""
        return self._paths[ordinal]

    def _scan(self, fd: int, path: Path, needle: bytes) -> None:
        base = len(self._paths) << OFFSET_BITS
        self._paths.append(path)
        size = os.fstat(fd).st_size
        seal = segments.read_seal(path)
        for item in segments.scan(fd, min(size, seal.length) if seal else size):
            # Most records are other batches', or of no use here: looking for the id is cheaper than decoding.
            if isinstance(item, Record) and needle in item.payload and _matters(item):
                self.places.append(base | item.offset)


def _matters(record: Record) -> bool:
    if record.type is Type.DECISION:
        return isinstance(decode(record.type, record.payload), Exhausted)
    return record.type is Type.RESULTS


def deliver(store: Store, settings: Settings, seen: BatchView, target: Path) -> Outputs:
    """Put what is answered so far into `target`; errors as `outputs.deliver`, or `UsageError` without the ledger."""
    batch = read_batch(store, seen.id)
    snapshot = _snapshot(store, settings, batch)
    paths = {name: target.absolute() / name for name in (OUTPUT, ERRORS)}
    with outputs.writing(seen.id, target):
        target.mkdir(parents=True, exist_ok=True)
        with replacing(paths[OUTPUT]) as output, replacing(paths[ERRORS]) as errors:
            _write(store, batch, snapshot, seen, output, errors)
    return Outputs(output=str(paths[OUTPUT]), errors=str(paths[ERRORS]), summary=None)


def lines(store: Store, settings: Settings, seen: BatchView) -> Iterator[bytes]:
    """The lines of what is answered so far, in the order of the input."""
    batch = read_batch(store, seen.id)
    snapshot = _snapshot(store, settings, batch)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        _write(store, batch, snapshot, seen, output, errors)
        output.seek(0)
        errors.seek(0)
        yield from outputs.merge(output, errors)


def _snapshot(store: Store, settings: Settings, batch: Batch) -> Snapshot:
    return Snapshot(ledger_folder(settings, store, batch.shard), batch.id)


def _write(store: Store, batch: Batch, snapshot: Snapshot, seen: BatchView, output: BinaryIO, errors: BinaryIO) -> None:
    reader = Reader(snapshot)
    try:
        with tempfile.TemporaryDirectory(prefix="batchmill-") as scratch:
            source = Source(batch=batch, places=snapshot.places, cut=None, partial=True)
            made = Assembler(source, ResultRecords(reader), BatchFiles(store, batch), Path(scratch)).write(
                output, errors
            )
    except DamagedBatch as exc:
        raise BatchmillError(f"{batch.id}: {exc.reason}") from None
    except FileNotFoundError:
        raise _ended(batch) from None
    finally:
        reader.close()
    found = made.completed + made.failed
    if found < seen.answered:
        if read_status(store, batch).status in FINAL:
            raise _ended(batch)
        beat = heartbeat(store, batch.shard)
        where = f"on {beat.host}, where the coordinator runs" if beat is not None else "where the coordinator runs"
        raise UsageError(
            f"{batch.id}: only {found:,} of {seen.answered:,} answers are in the log on this machine; "
            f"run it {where}, or set store.wal_dir as it is there"
        )


def _ended(batch: Batch) -> UsageError:
    # Its log went with it.
    return UsageError(f"{batch.id} has ended while its log was read; ask again for its outputs")
