"""Custom ids that are used in several windows of a file.

Ids are compared by 128-bit hashes, put in order by an external sort, and, where these are equal, in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

import numpy as np
from xxhash import xxh3_128_digest

from common.errors import Unreachable
from producers.intake.duplicates import Duplicate, Window
from producers.intake.external_sort import ExternalSort, Records
from producers.intake.temporary import spooled, write

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


class AcrossWindows:
    """Takes the custom ids of windows, in each of which every one stands once. `folder`: for temporary files."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._sort = ExternalSort(_HASHES, "high", folder)
        self._texts = spooled(folder)
        self._text_bytes = 0
        self._windows = 0

    def add(self, window: Window) -> None:
        """The next window."""
        ids = window.ids
        records = np.zeros(len(ids), _HASHES)
        hashes = np.frombuffer(b"".join(map(xxh3_128_digest, ids)), ">u8").reshape(-1, 2)
        records["high"] = hashes[:, 0]
        records["low"] = hashes[:, 1]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        ends = np.cumsum(lengths)
        records["offset"] = ends - lengths + self._text_bytes
        records["length"] = lengths
        records["line"] = window.lines
        records["index"] = window.indexes
        records["refused"] = window.refused
        write(self._texts, b"".join(ids))
        self._text_bytes += int(ends[-1])
        self._sort.add(records)
        self._windows += 1

    def repeats(self) -> Iterator[Duplicate]:
        """Those that an earlier window has, in order of their indexes; to be asked after the last window."""
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
