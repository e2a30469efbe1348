"""What the ledger's records say. Everything the coordinator knows about progress follows from them, in order."""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np

from common.messages import CacheFacts, Results
from producers.coordinator.row_states import Positions


class Type(IntEnum):
    """The kind of a record, one byte in its frame."""

    #: A worker's verified `Results` payload, as it came.
    RESULTS = 1
    #: `Dispatch`: written before the chunk is published.
    DISPATCH = 2
    #: `Lost`: a chunk is presumed lost, its open rows are sent again.
    LOST = 3
    #: `Decision`: something that cannot be derived from results.
    DECISION = 4
    #: `Finalised`: the outputs stand; the batch's other records are needed no more.
    FINALISED = 5
    #: `Evidence`: a message that was refused.
    EVIDENCE = 6


class SentSlice(msgspec.Struct, array_like=True, frozen=True):
    """Rows of one batch in a chunk: `[start, end)` without those whose bit in `wanted` is 0 (empty: all are there).

    `attempt` counts from 1. `charges`, `lapses` and `tried` are those of `lanes.Share`; `cost` is what the plan
    estimates for all these rows, in tokens (0: records of earlier versions do not say).
    """

    batch: str
    start: int
    end: int
    wanted: bytes
    attempt: int
    charges: int = 0
    lapses: int = 0
    tried: str = ""
    cost: int = 0

    def positions(self) -> Positions:
        """The rows' positions, ascending."""
        every = np.arange(self.start, self.end, dtype=np.uint32)
        if not self.wanted:
            return every
        bits = np.unpackbits(np.frombuffer(self.wanted, np.uint8), bitorder="little", count=len(every))
        return every[bits.astype(np.bool_)]


def sent_slice(
    batch: str, positions: Positions, attempt: int, charges: int = 0, lapses: int = 0, tried: str = "", cost: int = 0
) -> SentSlice:
    """The slice that holds exactly these positions (ascending, at least one)."""
    start, end = int(positions[0]), int(positions[-1]) + 1
    wanted = b""
    if end - start != len(positions):
        bits = np.zeros(end - start, dtype=np.uint8)
        bits[positions - start] = 1
        wanted = np.packbits(bits, bitorder="little").tobytes()
    return SentSlice(batch, start, end, wanted, attempt, charges, lapses, tried, cost)


class Dispatch(msgspec.Struct, array_like=True, frozen=True):
    """A chunk goes out."""

    chunk: str
    model: str
    #: Unix seconds.
    sent_at: float
    slices: list[SentSlice]
    #: The worker that it goes to by its own queue; empty: to whoever takes it from the model version's queue.
    node: str = ""
    #: The chunk that has the same rows already, of which nothing was heard for long; empty: none.
    copy_of: str = ""


class Lost(msgspec.Struct, array_like=True, frozen=True):
    """A chunk is given up. `leased`: it was lost with its lease, at `node`, so its rows may be what ended that."""

    chunk: str
    leased: bool
    node: str = ""


class Cancelled(msgspec.Struct, array_like=True, frozen=True, tag="cancelled"):
    """A person cancelled the batch; no row from position `cut` on was sent before, and none is sent after."""

    batch: str
    cut: int
    #: Unix seconds.
    at: float


class Expired(msgspec.Struct, array_like=True, frozen=True, tag="expired"):
    """The batch's deadline has passed; otherwise as `Cancelled`."""

    batch: str
    cut: int
    #: Unix seconds.
    at: float


class Paused(msgspec.Struct, array_like=True, frozen=True, tag="paused"):
    """Nothing more is sent until `Resumed`; what runs goes on."""

    batch: str
    #: Unix seconds.
    at: float


class Resumed(msgspec.Struct, array_like=True, frozen=True, tag="resumed"):
    """`Paused` is over."""

    batch: str
    #: Unix seconds.
    at: float


class Reprioritised(msgspec.Struct, array_like=True, frozen=True, tag="reprioritised"):
    """The batch's priority is another from here on."""

    batch: str
    priority: str
    #: Unix seconds.
    at: float


class Exhausted(msgspec.Struct, array_like=True, frozen=True, tag="exhausted"):
    """Attempts are used up: open rows (`positions`, little-endian u32) become errors.

    `use_line`: the last attempt left an error line, which is used; else one is made of `code` and `message`.
    """

    batch: str
    positions: bytes
    use_line: bool
    code: str
    message: str
    attempts: int


class Closed(msgspec.Struct, array_like=True, frozen=True, tag="closed"):
    """No result counts any more; the outputs are a function of what stands before this record."""

    batch: str
    #: Unix seconds; the batch's end in `summary.json`.
    at: float
    #: The result cache at that moment, for the summary; None: the batch did not use it, or nobody knew.
    cache: CacheFacts | None = None


class Reopened(msgspec.Struct, array_like=True, frozen=True, tag="reopened"):
    """Rows whose records turned out to be damaged after `Closed` are open again (`positions`: little-endian u32)."""

    batch: str
    positions: bytes


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """The batch cannot be processed: its files are damaged or missing."""

    batch: str
    reason: str
    #: Unix seconds.
    at: float


#: What ends a batch before all of it is answered.
Cut = Cancelled | Expired
Decision = Cut | Paused | Resumed | Reprioritised | Exhausted | Closed | Reopened | Failed


class Finalised(msgspec.Struct, array_like=True, frozen=True):
    """The batch's status is final and its outputs stand."""

    batch: str
    status: str


class Evidence(msgspec.Struct, array_like=True, frozen=True):
    """A refused message: never its content."""

    queue: str
    reason: str
    bytes: int
    #: blake3 of the message, hex.
    digest: str
    #: Unix seconds.
    at: float


Payload = Results | Dispatch | Lost | Decision | Finalised | Evidence

_decoders: dict[Type, msgspec.msgpack.Decoder[Payload]] = {
    Type.DISPATCH: msgspec.msgpack.Decoder(Dispatch),
    Type.LOST: msgspec.msgpack.Decoder(Lost),
    Type.DECISION: msgspec.msgpack.Decoder(Decision),
    Type.FINALISED: msgspec.msgpack.Decoder(Finalised),
    Type.EVIDENCE: msgspec.msgpack.Decoder(Evidence),
}

encode = msgspec.msgpack.Encoder().encode


def decode(kind: Type, payload: bytes) -> Payload:
    """The record's content, for all but `RESULTS` (those go through `common.messages.decode_results`)."""
    return _decoders[kind].decode(payload)


def pack_positions(positions: Positions) -> bytes:
    """Positions as little-endian u32."""
    return positions.astype("<u4").tobytes()


def unpack_positions(raw: bytes) -> Positions:
    """Positions out of little-endian u32."""
    return np.frombuffer(raw, dtype="<u4").astype(np.uint32)
