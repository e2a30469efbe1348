"""Which batches in a store have ended long ago, and how they are removed: nothing else ever takes a batch out of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from common.errors import BatchmillError, Damaged, UsageError
from common.ids import created_at, is_batch_id
from common.store import Store
from producers.batch import FINAL, Batch, folder, read_batch, read_status
from producers.intake.spool import INCOMING, release_key


class Old(NamedTuple):
    """A batch that may go. `name` and `ended_at` are None for what is left of one whose removal was cut short."""

    id: str
    name: str | None
    ended_at: float | None


def old(store: Store, before: float) -> list[Old]:
    """The batches that ended before `before` (Unix seconds), the oldest first.

    Not those that a batch which stays retries: its outputs are merged with theirs.
    """
    kept: dict[str, str | None] = {}
    found: dict[str, tuple[Old, str | None]] = {}
    active = {batch_id for shard in store.list("active") for batch_id in store.list(f"active/{shard}")}
    incoming = {name.partition(".")[0] for name in store.list(INCOMING)}
    for batch_id in sorted(filter(is_batch_id, store.list("batches"))):
        if created_at(batch_id) >= before or batch_id in incoming:
            with contextlib.suppress(BatchmillError):
                kept[batch_id] = read_batch(store, batch_id).retry_of
            continue
        try:
            batch = read_batch(store, batch_id)
            ended_at = _ended_at(store, batch)
        except UsageError:
            if batch_id not in active:
                found[batch_id] = Old(batch_id, None, None), None
            continue
        except Damaged:
            continue  # For a person to look at.
        if batch_id in active or ended_at is None or ended_at >= before:
            kept[batch_id] = batch.retry_of
        else:
            found[batch_id] = Old(batch_id, batch.name, ended_at), batch.retry_of
    for batch_id in list(kept):
        needed = kept[batch_id]
        while needed is not None and needed in found:
            _, needed = found.pop(needed)
    return [one for one, _ in found.values()]


def remove(store: Store, batches: list[Old]) -> Iterator[Old]:
    """Remove them, one after the other, with their idempotency keys; yields each that is gone."""
    for one in batches:
        key = None
        with contextlib.suppress(BatchmillError):
            key = read_batch(store, one.id).idempotency_key
        store.delete(folder(one.id))
        store.delete(f"control/{one.id}")
        if key is not None:
            release_key(store, key, one.id)
        yield one


def _ended_at(store: Store, batch: Batch) -> float | None:
    status = read_status(store, batch)
    return (status.finished_at or status.updated_at) if status.status in FINAL else None
