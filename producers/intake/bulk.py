"""Many small batches at once: made durable together, where one after the other waits for the disk a dozen times.

The steps are those of `spool`, taken by many batches side by side, and a kill at any moment leaves the same:
nothing of a batch, or all of it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterable, Iterator

from common.errors import BatchmillError
from common.registry import Registry
from common.settings import Settings
from common.store import LocalStore, Store
from producers.batch import Batch
from producers.intake import submission
from producers.intake.options import Options
from producers.intake.source import open_stream
from producers.intake.spool import INCOMING, Spool, encode_batch, publish_all, recover

#: Batches that are made durable together.
TOGETHER = 128
#: Bytes from which a batch is submitted by itself.
LARGE_BYTES = 256 << 10


def submit_many(
    sources: Iterable[bytes], store: Store, settings: Settings, registry: Registry, options: Options
) -> Iterator[Batch]:
    """Submit each source (the content of a batch file) as a batch, all with the same options, in order.

    A batch that is yielded is enqueued. What `submit` raises of a source is raised when its turn comes: those before it
    are enqueued, it and those after it are not.
    """
    options.check()
    local = isinstance(store, LocalStore) and options.idempotency_key is None
    numbers = itertools.count()
    pending: list[tuple[int, bytes]] = []
    for data in sources:
        pending.append((next(numbers), data))
        if len(pending) >= TOGETHER or len(data) > LARGE_BYTES or not local:
            yield from _submit_all(pending, store, settings, registry, options)
            pending = []
    if pending:
        yield from _submit_all(pending, store, settings, registry, options)


def _submit_all(
    sources: list[tuple[int, bytes]], store: Store, settings: Settings, registry: Registry, options: Options
) -> Iterator[Batch]:
    *most, (number, last) = sources
    alone = not isinstance(store, LocalStore) or options.idempotency_key is not None or len(last) > LARGE_BYTES
    if isinstance(store, LocalStore):
        made, refused = _submit_group(most if alone else sources, store, settings, registry, options)
        yield from made
        if refused is not None:
            raise refused
    if alone:
        yield submission.submit_bytes(last, store, settings, registry, options, _name(number))


def _submit_group(
    sources: list[tuple[int, bytes]], store: LocalStore, settings: Settings, registry: Registry, options: Options
) -> tuple[list[Batch], BatchmillError | None]:
    """The batches that were enqueued, and why the source after them was refused, if one was."""
    if not sources:
        return [], None
    recover(store)
    made: list[tuple[Spool, Batch]] = []
    refused: BatchmillError | None = None
    with contextlib.ExitStack() as spools:
        with store.group(lambda: None) as files:
            for number, data in sources:
                spool = spools.enter_context(Spool(store, files))
                try:
                    with open_stream(io.BytesIO(data), _name(number)) as opened:
                        batch = submission.make(opened, spool, settings, registry, options)
                except BatchmillError as exc:
                    files.discard(spool.folder)
                    refused = exc
                    break
                files.put(f"{spool.folder}/batch.json", encode_batch(batch))
                made.append((spool, batch))
            # The locks: what is left of a batch is found by its lock.
            store.sync(INCOMING)
        publish_all(store, made)
    return [batch for _, batch in made], refused


def _name(number: int) -> str:
    return f"source {number}"
