"""A new batch of the requests that another one left unanswered: failed, expired, cancelled.

They were checked and planned when they came in, so they are copied as they are, window by window, and keep their
order. Requests that intake itself refused (`--skip-invalid`) are not among them: they would be refused again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np

from common.errors import UsageError
from common.messages import Row
from common.plan import PLAN, ROWS
from common.plan_reader import PlanReader
from common.settings import Settings
from common.store import Store
from producers import outputs
from producers.batch import Batch, folder
from producers.intake.options import Options
from producers.intake.spool import Spool, find_by_key, recover, shard_of
from producers.plan_file import PlanWriter


def submit_again(store: Store, settings: Settings, earlier: Batch, options: Options) -> Batch:
    """The batch that retries `earlier`, which has ended; of `options`, what is None is as it was.

    The deadline and the hours of `earlier` are not taken over. Without a key, retrying it twice gives the same batch.
    Raises `UsageError` when there is nothing to retry, `NoOutputs` when it failed as a whole.
    """
    options.check()
    recover(store)
    key = options.idempotency_key or f"retry of {earlier.id}"
    if (made := find_by_key(store, key)) is not None:
        return made
    with Spool(store) as spool:
        with (
            spool.store.open_write(f"{spool.folder}/{ROWS}") as rows,
            spool.store.open_write(f"{spool.folder}/{PLAN}") as plan,
        ):
            writer = PlanWriter(rows, plan)
            _copy(store, earlier, writer)
        if not writer.planned:
            raise UsageError(f"{earlier.id}: nothing to retry, {_why_nothing(earlier)}")
        now = time.time()
        times = options.times(now)
        return spool.publish(
            Batch(
                id=spool.id,
                model=earlier.model,
                created_at=now,
                shard=shard_of(spool.id, settings.scheduler.shards),
                input=earlier.input,
                requests=writer.planned,
                planned=writer.planned,
                invalid=0,
                cost=writer.cost,
                windows=writer.windows,
                name=options.name or earlier.name,
                metadata={**earlier.metadata, **options.metadata},
                timeout_s=options.timeout_s or earlier.timeout_s,
                cache=earlier.cache,
                idempotency_key=key,
                tenant=options.tenant or earlier.tenant,
                priority=options.priority or earlier.priority,
                expires_at=times.expires_at,
                not_before=times.not_before,
                run_between=times.run_between,
                retry_of=earlier.id,
            )
        )


def _copy(store: Store, earlier: Batch, writer: PlanWriter) -> None:
    """Write the rows whose requests have no answer, numbered anew in the order of the input."""
    reader = PlanReader(store, folder(earlier.id), earlier.planned)
    decode = msgspec.msgpack.Decoder(Row).decode
    unanswered = _unanswered(store, earlier.id)
    ahead = next(unanswered, None)
    for window in earlier.windows:
        wanted: list[int] = []
        while ahead is not None and ahead < window.index_end:
            wanted.append(ahead)
            ahead = next(unanswered, None)
        if not wanted:
            continue
        records = reader.plan(window.pos_start, window.pos_end)
        where = np.flatnonzero(np.isin(records["index"], np.array(wanted, dtype=np.uint32)))
        if not len(where):
            continue
        # The new index of a request is its rank among those that are kept.
        ranks = np.argsort(np.argsort(records["index"][where], kind="stable"), kind="stable") + writer.planned
        kept = where.tolist()
        rows = (
            msgspec.structs.replace(decode(encoded), index=rank)
            for encoded, rank in zip(reader.some_rows(records, kept), ranks.tolist(), strict=True)
        )
        first = writer.planned
        writer.copy(rows, records, kept, first, first + len(kept))


def _unanswered(store: Store, batch_id: str) -> Iterator[int]:
    """Indexes of the requests in `errors.jsonl`, ascending; `NoOutputs` when the batch has no outputs."""
    return (outputs.index_of(line.data) for line in outputs.tagged(store, batch_id) if not line.good)


def _why_nothing(earlier: Batch) -> str:
    if earlier.invalid:
        return f"but {earlier.invalid:,} requests were refused at intake: mend them in the file and submit that"
    return "every request is answered"
