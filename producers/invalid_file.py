"""What intake leaves of requests that it refused, with `--skip-invalid`: `invalid` and `invalid.idx`."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from common.lines import encode_marks, error_line

INVALID = "invalid"
INVALID_INDEX = "invalid.idx"
INVALID_DTYPE = np.dtype([("offset", "<u8"), ("length", "<u4"), ("index", "<u4")])

#: Code of the error lines of requests that intake refused.
INVALID_CODE = "invalid_request"

#: Lines written at a time.
_WRITE_LINES = 2048


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
        if len(self._pending) >= _WRITE_LINES:
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
