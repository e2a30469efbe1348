"""Builds result messages: lines spliced from the engine's bytes, in columns, one part a batch."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import msgspec
import numpy as np

from common.lines import answer_line, encode_marks, error_line
from common.messages import Kind, Part, Row, Usage
from workers.attempt import Tried
from workers.outcome import Outcome

#: Bytes of one answer; a message that carries more is refused by RabbitMQ 4 (16 MiB), so it would never arrive.
MAX_ANSWER_BYTES = 12 << 20

_OUTPUT = Kind.OUTPUT
_TOO_LARGE = Tried(0, b"", Outcome(Kind.ERROR, "answer_too_large"))

#: What people read when a request got no answer, by the outcome's reason.
_MESSAGES = {
    "timeout": "the engine did not answer within {timeout:g} s",
    "finish_abort": "the engine aborted the request before it was answered",
    "answer_too_large": f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB; ask for less in one request",
    "unreadable_answer": "the engine's answer is not what its endpoint promises",
}


class Source(IntEnum):
    """Where the outcome of a row is from; a place in what `marks` gives."""

    ENGINE = 0
    #: From the engine, after the result cache was asked in vain.
    MISSED = 1
    CACHE = 2
    #: Computed for an equal request.
    SHARED = 3


class Done(msgspec.Struct, frozen=True, gc=False):
    """A finished row: `part` says which of the chunk's slices it belongs to."""

    part: int
    row: Row
    tried: Tried
    source: int = Source.ENGINE


@lru_cache(maxsize=256)
def marks(model: str, attempt: int, fingerprint: str) -> tuple[bytes, ...]:
    """The encoded `Marks` of a slice's answers, by `Source`."""
    return (
        encode_marks(model, attempt, fingerprint=fingerprint),
        encode_marks(model, attempt, cached=False, fingerprint=fingerprint),
        encode_marks(model, attempt, cached=True, fingerprint=fingerprint),
        encode_marks(model, attempt, shared=True, fingerprint=fingerprint),
    )


def parts(done: list[Done], batches: list[str], marked: list[tuple[bytes, ...]], timeout_s: float) -> list[Part]:
    """The parts of one message out of finished rows. `batches` and `marked` (see `marks`) are per slice."""
    by_batch: dict[str, list[Done]] = {}
    if len(batches) == 1:
        by_batch = {batches[0]: done} if done else {}
    else:
        for one in done:
            by_batch.setdefault(batches[one.part], []).append(one)
    return [_part(batch, mine, marked, timeout_s) for batch, mine in by_batch.items()]


def _part(batch: str, done: list[Done], marked: list[tuple[bytes, ...]], timeout_s: float) -> Part:
    usage = Usage()
    kinds = bytearray()
    lines: list[bytes] = []
    for one in done:
        tried, row = one.tried, one.row
        body, outcome = tried.body, tried.outcome
        if outcome.kind is _OUTPUT and len(body) <= MAX_ANSWER_BYTES and b"\n" not in body:
            mark = marked[one.part][one.source]
            lines.append(answer_line(batch, row.index, row.custom_id, tried.status, body, mark))
        else:
            if len(body) > MAX_ANSWER_BYTES:
                tried, outcome = _TOO_LARGE, _TOO_LARGE.outcome
            lines.append(_line(batch, row, tried, marked[one.part][one.source], timeout_s))
        kinds.append(outcome.kind)
        if outcome.kind is _OUTPUT:
            usage.prompt_tokens += outcome.prompt_tokens
            usage.completion_tokens += outcome.completion_tokens
            usage.cached_tokens += outcome.cached_tokens
            if one.source:
                _count(usage, one.source, len(body))
    return Part(
        batch=batch,
        pos=np.array([one.row.pos for one in done], dtype="<u4").tobytes(),
        kind=bytes(kinds),
        length=np.fromiter(map(len, lines), dtype="<u4", count=len(lines)).tobytes(),
        lines=b"".join(lines),
        usage=usage,
    )


def _count(usage: Usage, source: int, size: int) -> None:
    if source == Source.CACHE:
        usage.cache_hits += 1
        usage.cache_bytes += size
    elif source == Source.SHARED:
        usage.shared += 1
    else:
        usage.cache_misses += 1


def _line(batch: str, row: Row, tried: Tried, marks: bytes, timeout_s: float) -> bytes:
    kind, reason = tried.outcome.kind, tried.outcome.reason
    if tried.status == 0 or (kind is Kind.RETRY and tried.status < 300):
        # No answer, or one that is not believed: it must not reach a person as an answer.
        reason = reason or "no_answer"
        message = _MESSAGES.get(reason, "the engine did not answer the request ({reason})")
        text = message.format(timeout=timeout_s, reason=reason)
        return error_line(batch, row.index, row.custom_id, reason.removeprefix("finish_"), text, marks)
    body = tried.body
    if kind is not Kind.OUTPUT or b"\n" in body:
        body = _one_line(body)
    return answer_line(batch, row.index, row.custom_id, tried.status, body, marks)


def _one_line(body: bytes) -> bytes:
    """The body as JSON on one line, whatever a server in trouble wrote."""
    try:
        msgspec.json.decode(body)
        return body if b"\n" not in body else msgspec.json.format(body, indent=-1)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body[:1000].decode("utf-8", "replace")
        return msgspec.json.encode({"error": {"message": text, "type": "InternalServerError"}})
