"""What crosses a queue: versioned `msgspec` structs, MessagePack inside a signed envelope (`common.codec`).

Rows and results are packed as byte columns, because the queues carry hundreds of them a message: a chunk is built by
joining rows as the plan stored them, a result message is logged and assembled without decoding its lines.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec

from common.errors import BadMessage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Raised with every incompatible change; a message of another version is dead-lettered, never guessed at.
VERSION = 1

TASK_INFER = "batchmill.infer_chunk"
TASK_SUBMIT = "batchmill.submit"
QUEUE_INTAKE = "intake"
QUEUE_DEAD = "dead"


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request as a chunk carries it.

    `pos` is its place in the planned order and its identity on the wire, `index` its place among the accepted lines of
    the file (what output order and result ids follow), `custom_id` a JSON string literal, `url` an index into
    `common.urls.URLS`, `body` the request body's JSON.
    """

    pos: int
    index: int
    custom_id: bytes
    url: int
    body: bytes


class Slice(msgspec.Struct, array_like=True, frozen=True):
    """Rows of one batch out of `[start, end)` of its planned order; rows no longer wanted are left out.

    `rows` is a MessagePack array of `Row`. `attempt` counts from 1 and is the same for all rows of the slice.
    `tenant`: whose batch it is; tenants share no cached answers.
    """

    batch: str
    start: int
    end: int
    attempt: int
    rows: bytes
    tenant: str = "default"


class Chunk(msgspec.Struct, frozen=True):
    """One message to a worker: a unit of transport and redelivery, never a barrier in the engine."""

    v: int
    id: str
    model: str
    reply_to: str
    epoch: int
    sent_at: float
    #: Unix seconds after which a worker gives the chunk back (`TOO_LATE`): nobody waits for it any more. 0: never.
    not_after: float
    #: Seconds one request may take in the engine.
    timeout_s: float
    #: Result cache: off, read, write, on.
    cache: str
    slices: list[Slice]
    #: Its requests are suspected of ending engines: so many of them at a time may be in the engine, with nothing else
    #: there. 0: they are no suspects.
    isolated: int = 0
    #: Its requests have waited before, and go into the engine before those that are here: they were lost with another
    #: worker, failed there, or are what is left of a batch.
    ahead: bool = False


class Kind(IntEnum):
    """What a result is. `RETRY` is not final: its line is used only when attempts run out."""

    OUTPUT = 1
    ERROR = 2
    RETRY = 3


class Usage(msgspec.Struct, array_like=True):
    """Sums over the answers of one part: tokens, and how many requests were answered in which way.

    `cache_hits` by the result cache, whose answers had `cache_bytes` in all; `cache_misses` by the engine after the
    cache was asked in vain; `shared` by what was computed for an equal request at that moment.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bytes: int = 0
    shared: int = 0


class CacheFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The result cache's server as somebody last saw it; `evicted`: entries pushed out since it started."""

    entries: int
    bytes: int
    capacity_bytes: int
    evicted: int


class Part(msgspec.Struct, array_like=True):
    """Results of one batch, in columns of equal length.

    `pos` little-endian u32, `kind` u8 (`Kind`), `length` little-endian u32; `lines` is the result lines joined, each
    with its newline, whose lengths are `length`.
    """

    batch: str
    pos: bytes
    kind: bytes
    length: bytes
    lines: bytes
    usage: Usage


#: `Failure.code` of a chunk that a worker gave back because `not_after` has passed by its clock. The coordinator, whose
#: clock decides, knows whether that is so.
TOO_LATE = "too_late"


class Failure(msgspec.Struct, array_like=True):
    """Why a chunk ended without answering everything: the rows not answered count as one failed attempt."""

    code: str
    message: str


class Inside(msgspec.Struct, array_like=True):
    """Requests of one batch that were inside an engine; `pos` little-endian u32."""

    batch: str
    pos: bytes


class Crash(msgspec.Struct, array_like=True):
    """A worker ended abnormally while it held the chunk; said by its supervisor.

    `life` names the process, so that a report that comes twice counts once. `inside`: what its breadcrumb names of this
    chunk; each of these may be what ended it.
    """

    life: str
    reason: str
    inside: list[Inside]


class Results(msgspec.Struct):
    """A message from a worker: some results of a chunk. The last one of a chunk has `done` true.

    One with `crash` carries nothing else.
    """

    v: int
    chunk: str
    model: str
    node: str
    seq: int
    done: bool
    parts: list[Part]
    failure: Failure | None = None
    #: Seconds the worker had the chunk; set on the last message.
    elapsed_s: float = 0.0
    crash: Crash | None = None
    #: The result cache, where the chunk uses it, as the worker last saw it.
    cache: CacheFacts | None = None


_chunk_decoder = msgspec.msgpack.Decoder(Chunk)
_results_decoder = msgspec.msgpack.Decoder(Results)
_rows_decoder = msgspec.msgpack.Decoder(list[Row])
_encoder = msgspec.msgpack.Encoder()

encode = _encoder.encode


def decode_chunk(payload: bytes) -> Chunk:
    """The chunk in a verified payload; `BadMessage` on another version or schema."""
    try:
        chunk = _chunk_decoder.decode(payload)
    except (msgspec.DecodeError, ValueError) as exc:
        raise BadMessage(f"not a chunk of version {VERSION}: {type(exc).__name__}") from None
    if chunk.v != VERSION:
        raise BadMessage(f"chunk version {chunk.v}, this worker speaks {VERSION}")
    return chunk


def decode_results(payload: bytes) -> Results:
    """The results in a verified payload; `BadMessage` on another version, schema, or columns that do not agree."""
    try:
        results = _results_decoder.decode(payload)
    except (msgspec.DecodeError, ValueError) as exc:
        raise BadMessage(f"not results of version {VERSION}: {type(exc).__name__}") from None
    if results.v != VERSION:
        raise BadMessage(f"results version {results.v}, this coordinator speaks {VERSION}")
    for part in results.parts:
        n = len(part.kind)
        if len(part.pos) != 4 * n or len(part.length) != 4 * n:
            raise BadMessage("result columns of unequal length")
        if int(lengths(part).sum()) != len(part.lines):
            raise BadMessage("result lines do not have the lengths announced")
    if results.crash is not None and any(len(named.pos) % 4 for named in results.crash.inside):
        raise BadMessage("positions that are not whole")
    return results


def decode_rows(rows: bytes) -> list[Row]:
    """The rows of a slice; `BadMessage` when they do not decode."""
    try:
        return _rows_decoder.decode(rows)
    except (msgspec.DecodeError, ValueError) as exc:
        raise BadMessage(f"rows do not decode: {type(exc).__name__}") from None


def join_rows(rows: list[bytes]) -> bytes:
    """A MessagePack array out of rows that are encoded already."""
    return b"\xdd" + len(rows).to_bytes(4, "big") + b"".join(rows)


def positions(part: Part) -> npt.NDArray[np.uint32]:
    """`part.pos` as an array."""
    # Here and below, since every command reads structs of this module, and few of them arrays.
    import numpy as np

    return np.frombuffer(part.pos, dtype="<u4")


def kinds(part: Part) -> npt.NDArray[np.uint8]:
    """`part.kind` as an array."""
    import numpy as np

    return np.frombuffer(part.kind, dtype=np.uint8)


def lengths(part: Part) -> npt.NDArray[np.uint32]:
    """`part.length` as an array."""
    import numpy as np

    return np.frombuffer(part.length, dtype="<u4")


def infer_queue(model_version: str) -> str:
    """The routing key of a model version, `name@version` → `infer.<name>.<version>`."""
    name, _, version = model_version.partition("@")
    return f"infer.{name}.{version}"


def node_queue(model_version: str, node: str) -> str:
    """A worker's own queue."""
    return f"{infer_queue(model_version)}.{node}"


def results_queue(shard: int) -> str:
    """Where workers send results of the batches of a shard."""
    return f"results.{shard}"
