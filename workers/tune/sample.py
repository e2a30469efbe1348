"""The requests of a sample: lines as `producers submit` takes them, as far as an engine needs to know them."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import zstandard

from common.errors import UsageError
from common.urls import SHORT_FORM, URL_CODE

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class _Line(msgspec.Struct):
    body: msgspec.Raw
    url: str | None = None


_line = msgspec.json.Decoder(_Line).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read(path: Path, most: int) -> list[tuple[int, bytes]]:
    """The first `most` requests: position of the url in `URLS`, and body; `UsageError` names the line.

    Plain, gzip or zstd, told by the first bytes, a BOM left out, as `producers submit` takes a file.
    """
    found: list[tuple[int, bytes]] = []
    if (path.exists() and not path.is_file()) or str(path) == "-":
        raise UsageError(f"{path}: is no regular file, and each engine of the sweep reads it anew; name one")
    try:
        with open(path, "rb") as file, _unpacked(file) as lines:
            for number, line in enumerate(lines, 1):
                if len(found) == most:
                    break
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    found.append(_read_line(text, f"{path}:{number}"))
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as exc:
        raise UsageError(f"{path}: its compressed data is cut off or damaged: {exc}") from None
    except OSError as exc:
        raise UsageError(f"{path}: cannot be read: {exc.strerror}") from None
    if not found:
        raise UsageError(f"{path}: holds no request")
    return found


def _unpacked(file: BinaryIO) -> BinaryIO:
    first = file.read(len(_ZSTD))
    file.seek(0)
    if first.startswith(_GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if first == _ZSTD:
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
        return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, reader)))
    return file


def _read_line(line: bytes, where: str) -> tuple[int, bytes]:
    try:
        read_line = _line(line)
        fields: dict[str, Any] = _fields(read_line.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UsageError(f"{where}: is not a request line; `producers validate` says why") from None
    url = read_line.url or next((url for name, url in SHORT_FORM if name in fields), None)
    if url not in URL_CODE:
        raise UsageError(f"{where}: url: is missing or none that a request may name")
    return URL_CODE[url], bytes(read_line.body)
