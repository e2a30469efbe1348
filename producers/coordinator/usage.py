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
    body: _Body | None = None


class _Marks(msgspec.Struct):
    cached: bool = False


class _Line(msgspec.Struct):
    response: _Response | None = None
    batchmill: _Marks | None = None


_decode = msgspec.json.Decoder(_Line).decode


def add_usage(total: Usage, more: Usage) -> None:
    """Add `more` to `total`."""
    total.prompt_tokens += more.prompt_tokens
    total.completion_tokens += more.completion_tokens
    total.cached_tokens += more.cached_tokens
    total.cache_hits += more.cache_hits


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
    except (msgspec.DecodeError, ValueError):
        return Usage()
    cached = decoded.batchmill is not None and decoded.batchmill.cached
    found = Usage(cache_hits=int(cached))
    tokens = decoded.response.body.usage if decoded.response and decoded.response.body else None
    if tokens is not None:
        details = tokens.prompt_tokens_details or tokens.input_tokens_details
        found.prompt_tokens = tokens.prompt_tokens or tokens.input_tokens or 0
        found.completion_tokens = tokens.completion_tokens or tokens.output_tokens or 0
        found.cached_tokens = (details.cached_tokens or 0) if details else 0
    return found
