"""Lines that cannot be accepted: kept in order of the file, on disk when they are many."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from common.errors import InvalidInput
from producers.intake.temporary import spooled, write

#: Errors that a report shows; the report file has them all.
SHOWN = 100


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with a line: lines count from 1; `field` is a dotted path, empty for the line as a whole."""

    line: int
    field: str
    reason: str


class Report(msgspec.Struct, kw_only=True):
    """What intake found."""

    #: Lines that hold something, valid or not.
    requests: int
    #: The first `SHOWN` errors, in order of the lines.
    errors: list[LineError]
    error_count: int
    #: The model version of the batch; empty when no line could decide it.
    model: str = ""
    #: Estimated cost of the valid requests, in tokens.
    cost: int = 0
    #: Every error, one JSON object a line; None: `errors` has them all, or the file could not be written.
    report_file: str | None = None


class Rejected(InvalidInput):
    """A file that was refused, with its report."""

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """A refused request. `custom_id`: its JSON string literal, None where it has none that can be used."""

    index: int
    line: int
    custom_id: bytes | None
    field: str
    reason: str


class Refusals:
    """Refusals in order of their lines. `folder`: for the temporary file."""

    def __init__(self, folder: str | None = None) -> None:
        self._file = spooled(folder)
        self.count = 0

    def add(self, refusals: Iterable[Refusal]) -> None:
        """Add some whose lines come after all that were added before."""
        parts = []
        for refusal in refusals:
            raw = msgspec.msgpack.encode(refusal)
            parts.append(len(raw).to_bytes(4, "little"))
            parts.append(raw)
            self.count += 1
        write(self._file, b"".join(parts))

    def __iter__(self) -> Iterator[Refusal]:
        decode = msgspec.msgpack.Decoder(Refusal).decode
        self._file.seek(0)
        while head := self._file.read(4):
            yield decode(self._file.read(int.from_bytes(head, "little")))

    def merged(self, later: Iterable[Refusal]) -> Iterator[Refusal]:
        """These and others, which come in order of their lines, in one order."""
        return heapq.merge(self, later, key=lambda r: r.line)

    def close(self) -> None:
        """Let the temporary file go."""
        self._file.close()


class ReportFile:
    """Every error of a file, one JSON object a line. Failing to write it spoils nothing but the report.

    It is for whoever reads it to delete, so there is none unless it holds more than the `SHOWN` errors of the report.
    """

    def __init__(self, source: str) -> None:
        self.path: str | None = None
        self._stem = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(source).name)[:60]
        self._pending: list[bytes] = []
        self._fd: int | None = None
        self._failed = False

    def add(self, error: LineError) -> None:
        """Append one."""
        self._pending.append(msgspec.json.encode(error))
        if len(self._pending) >= 1024:
            self._flush()

    def close(self) -> None:
        """Write what is left."""
        if self._fd is not None or len(self._pending) > SHOWN:
            self._flush()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _flush(self) -> None:
        if not self._pending or self._failed:
            self._pending.clear()
            return
        data = b"\n".join(self._pending) + b"\n"
        self._pending.clear()
        try:
            if self._fd is None:
                self._fd, self.path = tempfile.mkstemp(".errors.jsonl", f"batchmill-{self._stem}-")
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._failed = True
            if self.path is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            self.path = None
