"""Temporary files of an intake."""

from __future__ import annotations

import tempfile
from typing import BinaryIO, cast

from common.errors import Unreachable

#: Bytes that are kept in memory before a temporary file is made at all.
SPOOL_BYTES = 1 << 20


def spooled(folder: str | None) -> BinaryIO:
    """A nameless temporary file that starts to exist once it is large."""
    return cast(BinaryIO, tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=folder))


def write(file: BinaryIO, data: bytes) -> None:
    """Write to a temporary file; `Unreachable` when its disk is full."""
    try:
        file.write(data)
    except OSError as exc:
        raise Unreachable(f"temporary files: {exc.strerror}; free some space or set TMPDIR to another disk") from None
