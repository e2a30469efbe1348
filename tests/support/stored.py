"""Batches put into a store by hand, as intake and the coordinator would have left them."""

from __future__ import annotations

from typing import Any

import msgspec
from blake3 import blake3

from common import lines
from common.ids import new_batch_id
from common.messages import Usage
from common.store import Store
from producers.batch import Batch, Counts, Heartbeat, Input, Status

MODEL = "echo-test@1"
NOW = 1_700_000_000.0


def batch(store: Store, *, requests: int = 10, created_at: float = NOW - 300, **fields: Any) -> Batch:
    """A batch that nobody has taken up."""
    made = Batch(
        id=new_batch_id(),
        model=MODEL,
        created_at=created_at,
        shard=0,
        input=Input(name="in.jsonl", bytes=1234, digest="0" * 64),
        requests=requests,
        planned=requests,
        invalid=0,
        cost=1,
        windows=[],
        **fields,
    )
    store.put_atomic(f"batches/{made.id}/batch.json", msgspec.json.encode(made))
    return made


def status(store: Store, of: Batch, status: str, completed: int = 0, failed: int = 0, **fields: Any) -> Status:
    """What the coordinator says of it."""
    made = Status(
        id=of.id,
        status=status,
        model=of.model,
        name=of.name,
        request_counts=Counts(of.requests, completed, failed),
        created_at=of.created_at,
        usage=fields.pop("usage", Usage(100, 200, 30, 4)),
        **fields,
    )
    store.put_atomic(f"batches/{of.id}/status.json", msgspec.json.encode(made))
    return made


def heartbeat(store: Store, at: float) -> None:
    """A sign of life of shard 0's coordinator."""
    store.put_atomic("coordinator/0.json", msgspec.json.encode(Heartbeat(epoch=1, host="h", pid=1, at=at)))


def outputs(store: Store, of: Batch, failed: set[int]) -> list[bytes]:
    """Both output files; the lines of all requests in input order."""
    marks = lines.encode_marks(of.model)
    made = [
        lines.error_line(of.id, i, b'"c%d"' % i, "timeout", "too slow", marks)
        if i in failed
        else lines.answer_line(of.id, i, b'"c%d"' % i, 200, b'{"n":%d}' % i, marks)
        for i in range(of.requests)
    ]
    good = [line for i, line in enumerate(made) if i not in failed]
    bad = [line for i, line in enumerate(made) if i in failed]
    put_outputs(store, of.id, b"".join(good), b"".join(bad))
    return made


def put_outputs(store: Store, batch_id: str, output: bytes, errors: bytes) -> None:
    """Output files with these bytes, and a summary that says so."""
    facts = {}
    for name, data in (("output", output), ("errors", errors)):
        store.put_atomic(f"batches/{batch_id}/{name}.jsonl", data)
        facts[name] = {"lines": data.count(b"\n"), "bytes": len(data), "digest": blake3(data).hexdigest()}
    store.put_atomic(f"batches/{batch_id}/summary.json", msgspec.json.encode(facts))
