"""Reads the planned rows of a batch (`common.plan`), a range at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from common.errors import BatchmillError
from common.plan import PLAN, ROWS
from common.store import Store

PLAN_DTYPE = np.dtype([("offset", "<u8"), ("length", "<u4"), ("index", "<u4"), ("cost", "<u4"), ("shared", "<u4")])

Records = npt.NDArray[np.void]

#: Bytes of rows read at a time, about, by `some_rows`.
_AT_ONCE = 4 << 20


class PlanReader:
    """Reads `rows` and `plan` of a folder of the store; each call reads one range of one file."""

    def __init__(self, store: Store, path: str, planned: int) -> None:
        self._store = store
        self._folder = path
        self._planned = planned

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

    def some_rows(self, records: Records, kept: Sequence[int]) -> Iterator[bytes]:
        """The encoded `Row`s of those `kept` (ascending) of consecutive plan records, read a few MiB at a time."""
        wanted = iter(kept)
        number = next(wanted, None)
        at = 0
        while number is not None:
            begin = int(records["offset"][at])
            end = max(at + 1, int(np.searchsorted(records["offset"], begin + _AT_ONCE)))
            rows = self.rows(records[at:end]) if number < end else []
            while number is not None and number < end:
                yield rows[number - at]
                number = next(wanted, None)
            at = end

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
