"""Custom ids that are used twice, in files of any length.

Ids are compared by 128-bit hashes and, where these are equal, in full. Repeats within a window are found at once;
those across windows at the end, by an external sort of the hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def add_window(
        self, requests: Sequence[tuple[int, int, bytes]], refused: Sequence[tuple[int, int, bytes]]
    ) -> list[Duplicate]:
        """Take the next window's `(index, line, custom_id)`; its own repeats, in order of their indexes.

        Custom ids are JSON string literals, equal for equal ids, below 64 KiB. `refused`: requests that were refused
        for another reason; their ids are taken, but they are not reported a second time.
        """
        if not requests and not refused:
            return []
        both = sorted([*((*r, 0) for r in requests), *((*r, 1) for r in refused)]) if refused else None
        indexes, lines, ids = zip(*requests, strict=True) if both is None else zip(*(b[:3] for b in both), strict=True)
        records = np.zeros(len(ids), _HASHES)
        hashes = np.frombuffer(b"".join(map(xxh3_128_digest, ids)), ">u8").reshape(-1, 2)
        records["high"] = hashes[:, 0]
        records["low"] = hashes[:, 1]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        ends = np.cumsum(lengths)
        records["offset"] = ends - lengths + self._text_bytes
        records["length"] = lengths
        records["line"] = lines
        records["index"] = indexes
        if both is not None:
            records["refused"] = [b[3] for b in both]
        write(self._texts, b"".join(ids))
        self._text_bytes += int(ends[-1])
        found: list[Duplicate] = []
        ordered = np.sort(records["high"])
        if np.any(ordered[1:] == ordered[:-1]):
            keep = np.ones(len(records), np.bool_)
            first: dict[bytes, int] = {}
            for n, custom_id in enumerate(ids):
                earlier = first.setdefault(custom_id, n)
                if earlier != n:
                    keep[n] = False
                    if not records["refused"][n]:
                        found.append(Duplicate(indexes[n], lines[n], lines[earlier], custom_id))
            records = records[keep]
        self._sort.add(records)
        self._windows += 1
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
