"""Custom ids that are used twice, in files of any length.

Ids are compared by 128-bit hashes and, where these are equal, in full. Repeats within a window are found at once;
those across windows at the end, by an external sort of the hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
from xxhash import xxh3_128_digest

from common.errors import Unreachable
from producers.intake.external_sort import ExternalSort, Records, spooled, write

_HASHES = np.dtype(
    [
        ("high", "<u8"),
        ("low", "<u8"),
        ("offset", "<u8"),
        ("line", "<u8"),
        ("index", "<u4"),
        ("length", "<u2"),
        ("refused", "<u2"),
    ]
)
_FOUND = np.dtype([("index", "<u8"), ("line", "<u8"), ("first_line", "<u8"), ("offset", "<u8"), ("length", "<u8")])


@dataclass(frozen=True)
class Duplicate:
    """A request whose custom id an earlier line has."""

    index: int
    line: int
    first_line: int
    custom_id: bytes


class Duplicates:
    """Takes every custom id of a file. `folder`: for temporary files."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._sort = ExternalSort(_HASHES, "high", folder)
        self._texts = spooled(folder)
        self._text_bytes = 0
        self._windows = 0
        self._ids: list[bytes] = []
        self._hashes: list[bytes] = []
        self._lines: list[int] = []
        self._indexes: list[int] = []
        self._refused: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, custom_id: bytes, line: int, index: int) -> None:
        """A request; indexes must rise. `custom_id`: a JSON string literal, equal for equal ids, below 64 KiB."""
        self._ids.append(custom_id)
        self._hashes.append(xxh3_128_digest(custom_id))
        self._lines.append(line)
        self._indexes.append(index)

    def add_refused(self, custom_id: bytes, line: int, index: int) -> None:
        """A request that was refused for another reason: its id is taken, but it is not reported a second time."""
        self._refused.append(len(self._ids))
        self.add(custom_id, line, index)

    def close_window(self) -> list[Duplicate]:
        """Ends a window: repeats within it, in order of their indexes."""
        if not self._ids:
            return []
        records = np.zeros(len(self._ids), _HASHES)
        hashes = np.frombuffer(b"".join(self._hashes), ">u8").reshape(-1, 2)
        records["high"] = hashes[:, 0]
        records["low"] = hashes[:, 1]
        lengths = np.fromiter(map(len, self._ids), np.int64, len(self._ids))
        ends = np.cumsum(lengths)
        records["offset"] = ends - lengths + self._text_bytes
        records["length"] = lengths
        records["line"] = self._lines
        records["index"] = self._indexes
        records["refused"][self._refused] = 1
        write(self._texts, b"".join(self._ids))
        self._text_bytes += int(ends[-1])
        found: list[Duplicate] = []
        ordered = np.sort(records["high"])
        if np.any(ordered[1:] == ordered[:-1]):
            keep = np.ones(len(records), np.bool_)
            first: dict[bytes, int] = {}
            refused = set(self._refused)
            for n, custom_id in enumerate(self._ids):
                earlier = first.setdefault(custom_id, n)
                if earlier != n:
                    keep[n] = False
                    if n not in refused:
                        found.append(Duplicate(self._indexes[n], self._lines[n], self._lines[earlier], custom_id))
            records = records[keep]
        self._sort.add(records)
        self._windows += 1
        for column in (self._ids, self._hashes, self._lines, self._indexes, self._refused):
            column.clear()
        return found

    def across_windows(self) -> Iterator[Duplicate]:
        """Repeats that only show across windows, in order of their indexes; call it once, after the last window."""
        if self._windows < 2:
            return
        found = ExternalSort(_FOUND, "index", self._folder)
        try:
            for records in self._sort:
                same = records["high"][1:] == records["high"][:-1]
                if not np.any(same):
                    continue
                alike = np.zeros(len(records), np.bool_)
                alike[1:] |= same
                alike[:-1] |= same
                suspects = records[alike]
                found.add(self._compare(suspects[np.lexsort((suspects["index"], suspects["low"], suspects["high"]))]))
            for records in found:
                for index, line, first_line, offset, length in records.tolist():
                    yield Duplicate(index, line, first_line, self._text(offset, length))
        finally:
            found.close()

    def _compare(self, suspects: Records) -> Records:
        """Of records sorted by hash and index: those whose text an earlier one of the same hash has."""
        rows: list[tuple[int, int, int, int, int]] = []
        for _, group in groupby(suspects.tolist(), key=itemgetter(0, 1)):
            first: dict[bytes, int] = {}
            for _, _, offset, line, index, length, refused in group:
                text = self._text(offset, length)
                earlier = first.setdefault(text, line)
                if earlier != line and not refused:
                    rows.append((index, line, earlier, offset, length))
        return np.array(rows, _FOUND)

    def _text(self, offset: int, length: int) -> bytes:
        try:
            self._texts.seek(offset)
            return self._texts.read(length)
        except OSError as exc:
            raise Unreachable(f"temporary files: {exc.strerror}") from None

    def close(self) -> None:
        """Let the temporary files go."""
        self._sort.close()
        self._texts.close()
