"""The files that intake leaves and the coordinator works from: `rows`, `plan`, `invalid`, `invalid.idx`.

Writers take a window at a time; readers read any stretch with one sequential read of each file, so nobody ever holds
more than the window or slice at hand. The layout is described in `producers.batch`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from common.errors import BatchmillError
from common.lines import encode_marks, error_line
from common.messages import Row
from common.store import Store
from producers.batch import INVALID_DTYPE, PLAN_DTYPE, Batch, Window, folder
from producers.planner import order

ROWS = "rows"
PLAN = "plan"
INVALID = "invalid"
INVALID_INDEX = "invalid.idx"

#: Code of the error lines of requests that intake refused.
INVALID_CODE = "invalid_request"

#: Rows encoded and written at a time: few system calls, and only a fraction of a window in memory twice.
_WRITE_ROWS = 2048
#: Bytes of a file read at a time when it is read from end to end.
_READ_BYTES = 1 << 20

_encode_row = msgspec.msgpack.Encoder().encode

Records = npt.NDArray[np.void]


class WindowRows:
    """The valid rows of a window being filled, in columns of equal length, in file order.

    `custom_ids` are JSON string literals, `keys` come from `planner.prefix_key`, `costs` are tokens.
    """

    __slots__ = ("bodies", "costs", "custom_ids", "indexes", "keys", "urls")

    def __init__(self) -> None:
        self.indexes: list[int] = []
        self.custom_ids: list[bytes] = []
        self.urls: list[int] = []
        self.bodies: list[bytes] = []
        self.keys: list[bytes] = []
        self.costs: list[int] = []

    def __len__(self) -> int:
        return len(self.indexes)

    def append(self, index: int, custom_id: bytes, url: int, body: bytes, key: bytes, cost: int) -> None:
        """Add the next row."""
        self.indexes.append(index)
        self.custom_ids.append(custom_id)
        self.urls.append(url)
        self.bodies.append(body)
        self.keys.append(key)
        self.costs.append(cost)

    def clear(self) -> None:
        """Start over."""
        for column in (self.indexes, self.custom_ids, self.urls, self.bodies, self.keys, self.costs):
            column.clear()

    def drop(self, indexes: set[int]) -> None:
        """Take rows out again."""
        kept = [n for n, index in enumerate(self.indexes) if index not in indexes]
        self.indexes = [self.indexes[n] for n in kept]
        self.custom_ids = [self.custom_ids[n] for n in kept]
        self.urls = [self.urls[n] for n in kept]
        self.bodies = [self.bodies[n] for n in kept]
        self.keys = [self.keys[n] for n in kept]
        self.costs = [self.costs[n] for n in kept]


class PlanWriter:
    """Writes `rows` and `plan`, window after window, into files opened by the caller."""

    def __init__(self, rows: BinaryIO, plan: BinaryIO) -> None:
        self._rows = rows
        self._plan = plan
        self._offset = 0
        #: Rows written so far, which is the position of the next.
        self.planned = 0
        #: Sum of their costs.
        self.cost = 0
        self.windows: list[Window] = []

    def add(self, rows: WindowRows, index_start: int, index_end: int) -> None:
        """Plan a window and write it; all its rows have indexes in `[index_start, index_end)`."""
        planned = order(rows.keys, rows.bodies)
        first = self.planned
        for at in range(0, len(planned), _WRITE_ROWS):
            part = planned[at : at + _WRITE_ROWS]
            self._write(
                [
                    _encode_row(Row(first + at + n, rows.indexes[k], rows.custom_ids[k], rows.urls[k], rows.bodies[k]))
                    for n, k in enumerate(part)
                ],
                [rows.indexes[k] for k in part],
                [rows.costs[k] for k in part],
            )
        self._close_window(first, index_start, index_end)

    def copy(self, rows: Sequence[Row], costs: Sequence[int], index_start: int, index_end: int) -> None:
        """Write a window that has its order already, giving its rows new positions."""
        first = self.planned
        for at in range(0, len(rows), _WRITE_ROWS):
            part = rows[at : at + _WRITE_ROWS]
            self._write(
                [_encode_row(Row(first + at + n, r.index, r.custom_id, r.url, r.body)) for n, r in enumerate(part)],
                [r.index for r in part],
                list(costs[at : at + _WRITE_ROWS]),
            )
        self._close_window(first, index_start, index_end)

    def _write(self, encoded: list[bytes], indexes: list[int], costs: list[int]) -> None:
        records = np.zeros(len(encoded), PLAN_DTYPE)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ends = np.cumsum(lengths)
        records["offset"] = ends - lengths + self._offset
        records["length"] = lengths
        records["index"] = indexes
        records["cost"] = costs
        self._rows.write(b"".join(encoded))
        self._plan.write(records.tobytes())
        self._offset += int(ends[-1])
        self.planned += len(encoded)
        self.cost += sum(costs)

    def _close_window(self, first: int, index_start: int, index_end: int) -> None:
        if index_end > index_start:
            self.windows.append(Window(first, self.planned, index_start, index_end))


class InvalidWriter:
    """Writes `invalid` and `invalid.idx`: the error lines of refused requests, in order of their indexes."""

    def __init__(self, lines: BinaryIO, index: BinaryIO, batch_id: str, model: str) -> None:
        self._lines = lines
        self._index = index
        self._batch_id = batch_id
        self._marks = encode_marks(model, attempts=0)
        self._offset = 0
        self._pending: list[tuple[int, bytes]] = []
        #: Lines written.
        self.count = 0

    def add(self, index: int, custom_id: bytes | None, message: str) -> None:
        """`custom_id` is a JSON string literal; None: the request has none that can be used."""
        line = error_line(self._batch_id, index, custom_id or b"null", INVALID_CODE, message, self._marks)
        self._pending.append((index, line))
        self.count += 1
        if len(self._pending) >= _WRITE_ROWS:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the files."""
        if not self._pending:
            return
        records = np.zeros(len(self._pending), INVALID_DTYPE)
        lengths = np.fromiter((len(line) for _, line in self._pending), np.int64, len(self._pending))
        ends = np.cumsum(lengths)
        records["offset"] = ends - lengths + self._offset
        records["length"] = lengths
        records["index"] = [index for index, _ in self._pending]
        self._lines.write(b"".join(line for _, line in self._pending))
        self._index.write(records.tobytes())
        self._offset += int(ends[-1])
        self._pending.clear()


class PlanReader:
    """Reads a batch's planned rows. Every method reads each file at most once, sequentially."""

    def __init__(self, store: Store, path: str, planned: int, windows: Sequence[Window]) -> None:
        self._store = store
        self._folder = path
        self._planned = planned
        self._windows = windows
        self._window_starts = [w.pos_start for w in windows]

    @classmethod
    def of(cls, store: Store, batch: Batch) -> PlanReader:
        """The reader of a batch that is in the store."""
        return cls(store, folder(batch.id), batch.planned, batch.windows)

    def plan(self, start: int, end: int) -> Records:
        """The `PLAN_DTYPE` records of positions `[start, end)`; `BatchmillError` when the file is too short."""
        if not 0 <= start <= end <= self._planned:
            raise ValueError(f"positions [{start}, {end}) of {self._planned}")
        if start == end:
            return np.zeros(0, PLAN_DTYPE)
        size = PLAN_DTYPE.itemsize
        raw = self._store.read_range(f"{self._folder}/{PLAN}", start * size, (end - start) * size)
        if len(raw) != (end - start) * size:
            raise BatchmillError(f"{self._store.url}/{self._folder}/{PLAN} is damaged: it ends before position {end}")
        return np.frombuffer(raw, PLAN_DTYPE)

    def rows(self, records: Records) -> list[bytes]:
        """The encoded `Row`s of consecutive plan records (a slice of what `plan` gave)."""
        if not len(records):
            return []
        first = int(records["offset"][0])
        ends = (records["offset"] - first + records["length"]).tolist()
        raw = self._store.read_range(f"{self._folder}/{ROWS}", first, ends[-1])
        if len(raw) != ends[-1]:
            raise BatchmillError(f"{self._store.url}/{self._folder}/{ROWS} is damaged: it ends too early")
        start = 0
        found = []
        for end in ends:
            found.append(raw[start:end])
            start = end
        return found

    def read(self, start: int, end: int, wanted: npt.NDArray[np.bool_] | None = None) -> list[bytes]:
        """The encoded `Row`s of positions `[start, end)`, only those that `wanted` (a mask of that length) marks."""
        records = self.plan(start, end)
        if wanted is None:
            return self.rows(records)
        marked = np.flatnonzero(wanted)
        if not len(marked):
            return []
        first, last = int(marked[0]), int(marked[-1]) + 1
        rows = self.rows(records[first:last])
        return [rows[n - first] for n in marked.tolist()]

    def indexes(self, start: int, end: int) -> npt.NDArray[np.uint32]:
        """The index of each position in `[start, end)`."""
        return self.plan(start, end)["index"].copy()

    def window_of(self, pos: int) -> Window:
        """The window a position belongs to."""
        if not 0 <= pos < self._planned:
            raise ValueError(f"position {pos} of {self._planned}")
        # Windows without rows share their start with the next one: the last of them is the one that has rows.
        return self._windows[bisect_right(self._window_starts, pos) - 1]


class InvalidReader:
    """Reads the ready-made error lines of a batch."""

    def __init__(self, store: Store, batch: Batch) -> None:
        self._store = store
        self._folder = folder(batch.id)
        self.count = batch.invalid

    def records(self, start: int, end: int) -> Records:
        """`INVALID_DTYPE` records `[start, end)`, in order of their indexes."""
        if start >= end:
            return np.zeros(0, INVALID_DTYPE)
        size = INVALID_DTYPE.itemsize
        raw = self._store.read_range(f"{self._folder}/{INVALID_INDEX}", start * size, (end - start) * size)
        if len(raw) != (end - start) * size:
            raise BatchmillError(f"{self._store.url}/{self._folder}/{INVALID_INDEX} is damaged: it ends too early")
        return np.frombuffer(raw, INVALID_DTYPE)

    def lines(self, records: Records) -> list[bytes]:
        """The error lines of consecutive records, each with its newline."""
        if not len(records):
            return []
        first = int(records["offset"][0])
        ends = (records["offset"] - first + records["length"]).tolist()
        raw = self._store.read_range(f"{self._folder}/{INVALID}", first, ends[-1])
        if len(raw) != ends[-1]:
            raise BatchmillError(f"{self._store.url}/{self._folder}/{INVALID} is damaged: it ends too early")
        return [raw[end - length : end] for end, length in zip(ends, records["length"].tolist(), strict=True)]

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """All `(index, line)`, in order of the indexes, in memory that does not grow with their number."""
        step = max(1, _READ_BYTES // 512)
        for start in range(0, self.count, step):
            records = self.records(start, min(start + step, self.count))
            yield from zip(records["index"].tolist(), self.lines(records), strict=True)
