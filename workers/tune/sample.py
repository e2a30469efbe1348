"""The requests of a sample: lines as `producers submit` takes them, as far as an engine needs to know them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from common.errors import UsageError
from common.urls import SHORT_FORM, URL_CODE


class _Line(msgspec.Struct):
    body: msgspec.Raw
    url: str | None = None


_line = msgspec.json.Decoder(_Line).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read(path: Path, most: int) -> list[tuple[int, bytes]]:
    """The first `most` requests: position of the url in `URLS`, and body; `UsageError` names the line."""
    found: list[tuple[int, bytes]] = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if len(found) == most:
                    break
                if line.strip():
                    found.append(_read_line(line, f"{path}:{number}"))
    except OSError as exc:
        raise UsageError(f"{path}: cannot be read: {exc.strerror}") from None
    if not found:
        raise UsageError(f"{path}: holds no request")
    return found


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
