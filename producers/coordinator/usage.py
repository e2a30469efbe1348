"""Token usage of results. A part's sums hold for all its lines; where only some of them count, those are read."""

from __future__ import annotations

import msgspec
import numpy as np

from common.messages import Part, Usage, lengths
from producers.coordinator.row_states import Mask


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Tokens(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Tokens | None = None


class _Response(msgspec.Struct):
    status_code: int = 0
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Marks(msgspec.Struct):
    cached: bool | None = None
    shared: bool = False


class _Line(msgspec.Struct):
    response: _Response | None = None
    batchmill: _Marks | None = None


_decode = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body | None).decode


def add_usage(total: Usage, more: Usage) -> None:
    """Add `more` to `total`."""
    total.prompt_tokens += more.prompt_tokens
    total.completion_tokens += more.completion_tokens
    total.cached_tokens += more.cached_tokens
    total.cache_hits += more.cache_hits
    total.cache_misses += more.cache_misses
    total.cache_bytes += more.cache_bytes
    total.shared += more.shared


def usage_of_part(part: Part, counted: Mask) -> Usage:
    """What the counted results of a part used."""
    if counted.all():
        return part.usage
    total = Usage()
    ends = np.cumsum(lengths(part), dtype=np.int64)
    starts = ends - lengths(part)
    for which in np.flatnonzero(counted):
        add_usage(total, usage_of_line(part.lines[int(starts[which]) : int(ends[which])]))
    return total


def usage_of_line(line: bytes) -> Usage:
    """What one result line says it used; nothing for a line without usage."""
    try:
        decoded = _decode(line)
        response = decoded.response if decoded.response is not None and decoded.response.status_code < 300 else None
        body = _decode_body(response.body) if response is not None else None
    except (msgspec.DecodeError, ValueError):
        return Usage()
    found = Usage()
    marks = decoded.batchmill
    if marks is not None and response is not None:
        found.shared = int(marks.shared)
        found.cache_hits = int(marks.cached is True)
        found.cache_misses = int(marks.cached is False)
        found.cache_bytes = len(bytes(response.body)) if marks.cached else 0
    tokens = body.usage if body is not None else None
    if tokens is not None:
        details = tokens.prompt_tokens_details or tokens.input_tokens_details
        found.prompt_tokens = tokens.prompt_tokens or tokens.input_tokens or 0
        found.completion_tokens = tokens.completion_tokens or tokens.output_tokens or 0
        found.cached_tokens = (details.cached_tokens or 0) if details else 0
    return found
