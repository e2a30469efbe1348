"""Reads the files of a batch that intake wrote: the plan, the rows, the lines of invalid requests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from common.errors import BadMessage
from common.messages import Row, decode_rows, join_rows
from common.plan_reader import PLAN_DTYPE
from common.store import Store
from producers.batch import Batch, folder
from producers.coordinator.row_states import Positions
from producers.invalid_file import INVALID_DTYPE

#: Plan records that are kept for the next call, at most.
_KEPT = 4096


class DamagedBatch(Exception):
    """The batch's own files are missing or do not fit together; `reason` names the file and what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BatchFiles:
    """One batch's files. Every read is one range of one file; `DamagedBatch` when it does not hold what it should."""

    def __init__(self, store: Store, batch: Batch) -> None:
        self._store = store
        self._batch = batch
        self._folder = folder(batch.id)
        #: The records that were read last: rows are sized up first and then read.
        self._last: tuple[int, int, npt.NDArray[np.void]] | None = None
        #: Whose batch it is.
        self.tenant = batch.tenant

    def plan(self, start: int, end: int) -> npt.NDArray[np.void]:
        """The `PLAN_DTYPE` records of positions `[start, end)`."""
        if self._last is not None and self._last[0] <= start and end <= self._last[1]:
            return self._last[2][start - self._last[0] : end - self._last[0]]
        size = PLAN_DTYPE.itemsize
        raw = self._read("plan", start * size, (end - start) * size)
        records = np.frombuffer(raw, dtype=PLAN_DTYPE)
        if end - start <= _KEPT:
            self._last = start, end, records
        return records

    def row_sizes(self, positions: Positions) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Bytes of each row, and its estimated cost in tokens (positions ascending, close together)."""
        first = int(positions[0])
        plan = self.plan(first, int(positions[-1]) + 1)[positions - first]
        return plan["length"].astype(np.int64), plan["cost"].astype(np.int64)

    def shared(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Bytes that each row of positions `[start, end)` has in common with the one before it (`PLAN_DTYPE`)."""
        return self.plan(start, end)["shared"].astype(np.int64)

    def rows(self, positions: Positions) -> bytes:
        """A MessagePack array of the rows at these positions (ascending), read in one go and checked."""
        first, last = int(positions[0]), int(positions[-1])
        plan = self.plan(first, last + 1)
        self._last = None
        begin = int(plan["offset"][0])
        ends = plan["offset"] + plan["length"]
        raw = self._read("rows", begin, int(ends[-1]) - begin)
        if len(positions) == last + 1 - first:
            packed = b"\xdd" + len(positions).to_bytes(4, "big") + raw
        else:
            mine = plan[positions - first]
            starts = (mine["offset"] - begin).tolist()
            packed = join_rows([raw[s : s + n] for s, n in zip(starts, mine["length"].tolist(), strict=True)])
        decoded = self._decode(packed, first)
        if [row.pos for row in decoded] != positions.tolist():
            raise self._damaged("rows", f"position {first} and after do not hold the rows of the plan")
        return packed

    def each_row(self, positions: Positions, most_bytes: int = 4 << 20) -> Iterator[Row]:
        """The rows at these positions (ascending), read in stretches of about `most_bytes`."""
        at = 0
        while at < len(positions):
            # A stretch ends where the next wanted row is far away, or enough is read.
            some = positions[at : at + 4096]
            first = int(some[0])
            near = int(np.searchsorted(some, first + 4096))
            plan = self.plan(first, int(some[near - 1]) + 1)
            reach = (plan["offset"] + plan["length"])[some[:near] - first] - plan["offset"][0]
            count = max(1, int(np.searchsorted(reach, most_bytes, side="right")))
            yield from self._decode(self.rows(some[:count]), first)
            at += count

    def invalid(self) -> Iterator[tuple[int, bytes]]:
        """`(index, line)` of the requests that intake refused, in order of their indexes."""
        size = INVALID_DTYPE.itemsize
        for start in range(0, self._batch.invalid, 1024):
            count = min(1024, self._batch.invalid - start)
            records = np.frombuffer(self._read("invalid.idx", start * size, count * size), dtype=INVALID_DTYPE)
            begin = int(records["offset"][0])
            ends = (records["offset"] + records["length"] - begin).tolist()
            raw = self._read("invalid", begin, ends[-1])
            for index, length, end in zip(records["index"].tolist(), records["length"].tolist(), ends, strict=True):
                yield index, raw[end - length : end]

    def _decode(self, packed: bytes, position: int) -> list[Row]:
        try:
            return decode_rows(packed)
        except BadMessage:
            raise self._damaged("rows", f"the row at position {position} or after does not decode") from None

    def _read(self, name: str, start: int, length: int) -> bytes:
        try:
            raw = self._store.read_range(f"{self._folder}/{name}", start, length)
        except FileNotFoundError:
            raise self._damaged(name, "is missing") from None
        if len(raw) != length:
            raise self._damaged(name, f"ends at byte {start + len(raw)}, {start + length} were expected")
        return raw

    def _damaged(self, name: str, what: str) -> DamagedBatch:
        return DamagedBatch(f"{self._folder}/{name}: {what}; submit the file again")
