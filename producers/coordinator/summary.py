"""`summary.json`: what became of a batch, in numbers. The same bytes each time the batch is assembled."""

from __future__ import annotations

import msgspec

from common.messages import CacheFacts, Usage
from producers.batch import Batch
from producers.coordinator.assembler import Assembled


class Timings(msgspec.Struct, kw_only=True):
    """Unix seconds; durations in seconds."""

    created_at: float
    #: First dispatch; null when nothing was ever sent.
    started_at: float | None
    #: When the last result counted.
    finished_at: float
    elapsed_s: float
    #: Requests settled a second, between start and end.
    requests_per_s: float | None
    output_tokens_per_s: float | None


class FileFacts(msgspec.Struct, kw_only=True):
    """An output file."""

    lines: int
    bytes: int
    #: blake3, hex.
    digest: str


class Summary(msgspec.Struct, kw_only=True):
    """The content of `summary.json`."""

    id: str
    status: str
    model: str
    name: str | None
    metadata: dict[str, str]
    total: int
    completed: int
    failed: int
    #: Of the failed: refused at intake (`--skip-invalid`).
    invalid: int
    usage: Usage
    #: The server of the result cache when the batch ended; null: the batch did not use it, or no worker had seen it.
    cache: CacheFacts | None
    #: Rows sent more than once, and results that came for rows that were answered already.
    resent: int
    duplicates: int
    timings: Timings
    input_name: str
    input_digest: str
    output: FileFacts
    errors: FileFacts


def encode(
    batch: Batch,
    status: str,
    assembled: Assembled,
    usage: Usage,
    cache: CacheFacts | None,
    started_at: float | None,
    closed_at: float,
    resent: int,
    duplicates: int,
) -> bytes:
    """The bytes of the file."""
    elapsed = max(0.0, closed_at - started_at) if started_at is not None else 0.0
    settled = assembled.completed + assembled.failed - assembled.missed - batch.invalid
    summary = Summary(
        id=batch.id,
        status=status,
        model=batch.model,
        name=batch.name,
        metadata=batch.metadata,
        total=assembled.completed + assembled.failed,
        completed=assembled.completed,
        failed=assembled.failed,
        invalid=batch.invalid,
        usage=usage,
        cache=cache,
        resent=resent,
        duplicates=duplicates,
        timings=Timings(
            created_at=batch.created_at,
            started_at=started_at,
            finished_at=closed_at,
            elapsed_s=round(elapsed, 3),
            requests_per_s=round(settled / elapsed, 3) if elapsed else None,
            output_tokens_per_s=round(usage.completion_tokens / elapsed, 3) if elapsed else None,
        ),
        input_name=batch.input.name,
        input_digest=batch.input.digest,
        output=FileFacts(lines=assembled.completed, bytes=assembled.output_bytes, digest=assembled.output_digest),
        errors=FileFacts(lines=assembled.failed, bytes=assembled.errors_bytes, digest=assembled.errors_digest),
    )
    plain = msgspec.to_builtins(summary)
    plain["usage"] = {name: getattr(usage, name) for name in Usage.__struct_fields__}
    return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"
