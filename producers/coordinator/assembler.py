"""Makes the output files of a batch out of the ledger: input order, bounded memory, the same bytes every time.

First every row's final line is located (`position_table`), then each window of the plan is written: its lines lie
close together in the ledger, since rows are sent in planned order, so they are read in large stretches. What has no
line gets one here: cancelled rows, rows whose attempts are used up; lines of invalid requests are merged in.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from common.lines import encode_marks, error_line
from common.logs import get
from common.messages import Row
from common.store import FileGroup
from producers.batch import Batch, folder
from producers.coordinator.batch_files import BatchFiles
from producers.coordinator.position_table import ERROR, OUTPUT, PositionTable
from producers.coordinator.records import Exhausted, Type, decode, unpack_positions
from producers.coordinator.result_records import Part, ResultRecords
from producers.coordinator.row_states import Positions
from producers.coordinator.segments import FRAME

log = get(__name__)

OUTPUT_FILE, ERRORS_FILE = "output.jsonl", "errors.jsonl"

#: Bytes of lines in memory at a time.
_STRETCH = 8 << 20
#: Lines that far apart in the ledger are read in one go.
_GAP = 64 << 10
_READ = 1 << 20
_WRITE = 1 << 20
#: What a row without an outcome gets, by what ended the batch.
_CUTS = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
    "expired": ("batch_expired", "the batch's completion window ended before this request was answered"),
}


class MissingRows(Exception):
    """Rows that were settled have no readable record any more: they must be answered again."""

    def __init__(self, positions: Positions) -> None:
        super().__init__(f"{len(positions)} rows have no readable record")
        self.positions = positions


class Stopped(Exception):
    """The assembly was given up because the coordinator stops; nothing of it is left."""


@dataclass(slots=True)
class Assembled:
    """What was written."""

    completed: int = 0
    failed: int = 0
    output_digest: str = ""
    errors_digest: str = ""
    output_bytes: int = 0
    errors_bytes: int = 0
    #: Rows that a cut left without an outcome, which are among the failed.
    missed: int = 0


@dataclass(slots=True)
class Source:
    """What the assembler needs to know of a batch."""

    batch: Batch
    places: Sequence[int]
    #: What ended the batch before all of it was answered: `cancelled`, `expired`; None: nothing.
    cut: str | None
    #: Take what is there, and leave out what is not (mid-run).
    partial: bool = False
    #: Asked now and then; True gives up.
    stop: Callable[[], bool] = lambda: False


class Assembler:
    """Assembles one batch out of the ledger's `records`."""

    def __init__(self, source: Source, records: ResultRecords, files: BatchFiles, scratch: Path) -> None:
        self._source = source
        self._batch = source.batch
        self._records = records
        self._reader = records.reader
        self._files = files
        self._decisions: list[Exhausted] = []
        windows = [w for w in source.batch.windows if w.pos_end > w.pos_start]
        self._windows = windows
        self._table = PositionTable(windows, scratch / f".assembly-{source.batch.id}")
        self._lost_marks = encode_marks(source.batch.model, attempts=0)
        self._looked_at = time.monotonic()
        self._missed = 0

    def to_group(self, group: FileGroup) -> Assembled:
        """Write `output.jsonl` and `errors.jsonl` into a group of files.

        `MissingRows` when a settled row's record cannot be read, `DamagedBatch` when the batch's files cannot.
        """
        base = folder(self._batch.id)
        with group.open_write(f"{base}/{OUTPUT_FILE}") as output, group.open_write(f"{base}/{ERRORS_FILE}") as errors:
            return self.write(output, errors)

    def write(self, output: BinaryIO, errors: BinaryIO) -> Assembled:
        """Write both files into open ones."""
        try:
            self._locate()
            if self._source.cut is None and not self._source.partial:
                self._check_whole()
            good, bad = _Sink(output), _Sink(errors)
            invalid = _Peekable(self._files.invalid())
            for number in range(len(self._windows)):
                self._write_window(number, good, bad, invalid)
                self._let_go()
            for _, line in invalid:
                bad.write(line)
            return Assembled(
                good.lines,
                bad.lines,
                good.finish(),
                bad.finish(),
                output_bytes=good.bytes,
                errors_bytes=bad.bytes,
                missed=self._missed,
            )
        finally:
            self._table.close()

    # -- where every row's line is ---------------------------------------------------------------------------------

    def _locate(self) -> None:
        for place in self._source.places:
            self._let_go()
            found = self._records.get(place, self._batch.id)
            if found is None:
                log.error("record_damaged", batch=self._batch.id, place=place)
                continue
            record, parts = found
            if record.type is Type.RESULTS:
                self._locate_lines(place, record.payload, parts)
            else:
                decision = decode(record.type, record.payload)
                if isinstance(decision, Exhausted):
                    self._table.give_up(
                        unpack_positions(decision.positions), len(self._decisions), keep_line=decision.use_line
                    )
                    self._decisions.append(msgspec.structs.replace(decision, positions=b""))

    def _locate_lines(self, place: int, payload: bytes, parts: list[Part]) -> None:
        base = _address(payload)
        for part in parts:
            if not part.pos:
                continue
            positions = np.frombuffer(part.pos, dtype="<u4")
            if int(positions.max()) >= self._batch.planned:
                continue
            lengths = np.frombuffer(part.length, dtype="<u4")
            ends = np.cumsum(lengths, dtype=np.uint64)
            start = place + FRAME + (_address(part.lines) - base if len(part.lines) else 0)
            self._table.put(
                positions,
                np.frombuffer(part.kind, dtype=np.uint8),
                ends - lengths + np.uint64(start),
                lengths,
            )

    def _check_whole(self) -> None:
        missing = []
        for number, window in enumerate(self._windows):
            rank = self._table.window(number)["rank"]
            missing.append(window.pos_start + np.flatnonzero(rank < ERROR))
        positions = np.concatenate(missing) if missing else np.empty(0)
        if len(positions):
            raise MissingRows(positions.astype(np.uint32))

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write_window(self, number: int, good: _Sink, bad: _Sink, invalid: _Peekable) -> None:
        window = self._windows[number]
        table = self._table.window(number)
        indexes = self._files.plan(window.pos_start, window.pos_end)["index"]
        order = np.argsort(indexes, kind="stable")
        if self._source.partial:
            order = order[table["rank"][order] >= ERROR]
        # A line that is made here counts as some hundred bytes.
        reach = np.cumsum(np.maximum(table["length"][order], 256), dtype=np.int64)
        start = 0
        while start < len(order):
            taken = int(reach[start - 1]) if start else 0
            end = max(start + 1, int(np.searchsorted(reach, taken + _STRETCH, side="right")))
            self._write_stretch(table, order[start:end], indexes, window.pos_start, good, bad, invalid)
            start = end

    def _write_stretch(
        self,
        table: npt.NDArray[np.void],
        rows: npt.NDArray[np.intp],
        indexes: npt.NDArray[np.uint32],
        first: int,
        good: _Sink,
        bad: _Sink,
        invalid: _Peekable,
    ) -> None:
        entries = table[rows]
        rank = entries["rank"]
        stored = (entries["length"] > 0) & (rank >= ERROR)
        lines: list[bytes] = [b""] * len(rows)
        where = np.flatnonzero(stored)
        self._fetch(entries[where], where, lines)
        made = np.flatnonzero(~stored)
        if len(made):
            self._make(entries[made], (first + rows[made]).astype(np.uint32), made, lines)
        if (rank == OUTPUT).all():
            good.write_many(lines)
        else:
            good.write_many([lines[i] for i in np.flatnonzero(rank == OUTPUT).tolist()])
            failed = np.flatnonzero(rank != OUTPUT)
            for i, index in zip(failed.tolist(), indexes[rows[failed]].tolist(), strict=True):
                for _, line in invalid.until(index):
                    bad.write(line)
                bad.write(lines[i])

    def _fetch(self, entries: npt.NDArray[np.void], where: npt.NDArray[np.intp], lines: list[bytes]) -> None:
        """Read the lines of these entries, in stretches, in the order in which they lie in the ledger."""
        if not len(entries):
            return
        by_place = np.argsort(entries["place"], kind="stable")
        places = entries["place"][by_place].astype(np.int64)
        ends = places + entries["length"][by_place]
        targets = where[by_place].tolist()
        starts = [0, *(np.flatnonzero(places[1:] - ends[:-1] > _GAP) + 1).tolist(), len(places)]
        for begin, stop in itertools.pairwise(starts):
            at = begin
            while at < stop:
                base = int(places[at])
                upto = max(at + 1, at + int(np.searchsorted(ends[at:stop], base + _READ, side="right")))
                block = self._reader.pread(base, int(ends[upto - 1]) - base)
                low, high = (places[at:upto] - base).tolist(), (ends[at:upto] - base).tolist()
                for target, s, e in zip(targets[at:upto], low, high, strict=True):
                    lines[target] = block[s:e]
                at = upto

    def _make(
        self, entries: npt.NDArray[np.void], positions: Positions, where: npt.NDArray[np.intp], lines: list[bytes]
    ) -> None:
        """Lines of rows that have none: given up, or cancelled."""
        order = np.argsort(positions, kind="stable")
        ranks, places = entries["rank"][order].tolist(), entries["place"][order].tolist()
        targets = where[order].tolist()
        for n, row in enumerate(self._files.each_row(positions[order])):
            lines[targets[n]] = self._made_line(row, ranks[n], places[n])

    def _made_line(self, row: Row, rank: int, place: int) -> bytes:
        if rank < ERROR:
            self._missed += 1
            said = _CUTS[self._source.cut or "cancelled"]
            return error_line(self._batch.id, row.index, row.custom_id, *said, self._lost_marks)
        decision = self._decisions[place]
        marks = encode_marks(self._batch.model, attempts=decision.attempts)
        return error_line(self._batch.id, row.index, row.custom_id, decision.code, decision.message, marks)

    def _let_go(self) -> None:
        """Let other threads run: an assembly must not hold up results that come in meanwhile."""
        if self._source.stop():
            raise Stopped
        now = time.monotonic()
        if now - self._looked_at > 0.05:
            time.sleep(0)
            self._looked_at = time.monotonic()


class _Sink:
    """Writes lines in large pieces and knows their digest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = blake3()
        self._pending: list[bytes] = []
        self._size = 0
        self.lines = 0
        self.bytes = 0

    def write(self, line: bytes) -> None:
        """Add one line."""
        self._pending.append(line)
        self.lines += 1
        self._size += len(line)
        if self._size >= _WRITE:
            self._flush()

    def write_many(self, lines: list[bytes]) -> None:
        """Add lines."""
        step = 2048
        for start in range(0, len(lines), step):
            some = lines[start : start + step]
            self._pending.extend(some)
            self._size += sum(map(len, some))
            if self._size >= _WRITE:
                self._flush()
        self.lines += len(lines)

    def finish(self) -> str:
        """Write the rest; the digest of everything, hex."""
        self._flush()
        return self._hash.hexdigest()

    def _flush(self) -> None:
        data = b"".join(self._pending)
        self._hash.update(data)
        self._file.write(data)
        self.bytes += len(data)
        self._pending.clear()
        self._size = 0


class _Peekable:
    """`(index, line)` pairs in order of index, taken up to a bound."""

    def __init__(self, pairs: Iterator[tuple[int, bytes]]) -> None:
        self._pairs = pairs
        self._next = next(pairs, None)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        while self._next is not None:
            pair, self._next = self._next, next(self._pairs, None)
            yield pair

    def until(self, index: int) -> Iterator[tuple[int, bytes]]:
        """Those before `index`."""
        while self._next is not None and self._next[0] < index:
            pair, self._next = self._next, next(self._pairs, None)
            yield pair


def _address(data: bytes | memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])
