"""`submit` and `validate`: from a file to a batch in the store, or to a report of what is wrong with it."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from common.errors import UsageError
from common.messages import Row
from common.plan import PLAN, ROWS
from common.registry import Registry
from common.settings import Settings
from common.store import LocalStore, Store
from producers.batch import Batch, Input
from producers.intake.options import Options
from producers.intake.reading import Progress, Reading
from producers.intake.refusals import Rejected, Report
from producers.intake.rules import Rules
from producers.intake.source import Source, open_source, open_stream
from producers.intake.spool import INCOMING, Spool, find_by_key, recover, shard_of
from producers.plan_file import PlanWriter


def validate(
    source: str, settings: Settings, registry: Registry, options: Options, progress: Progress | None = None
) -> Report:
    """Read a file and say what is wrong with it; needs no store and no broker, writes nothing but the report file.

    Raises `UsageError` for what is no file or no text.
    """
    options.check()
    rules = Rules(settings, registry, options.model, options.max_tokens_default)
    with open_source(source) as opened, Reading(opened, rules, progress=progress) as reading:
        reading.run(None)
        return reading.report()


def submit(
    source: str,
    store: Store,
    settings: Settings,
    registry: Registry,
    options: Options,
    progress: Progress | None = None,
) -> Batch:
    """Make a batch out of a file: a path, `-`, or a URL that fsspec opens; plain, gzip or zstd.

    Raises `Rejected` (an `InvalidInput` with `.report`) when the file cannot be taken, `UsageError` for what is no
    file, or not the one that the idempotency key stands for, `Unreachable` for a store that does not answer or is full.
    Nothing is visible in the store then.
    """
    options.check()
    with open_source(source) as opened:
        return _submit(opened, store, settings, registry, options, progress)


def submit_stream(
    stream: BinaryIO, store: Store, settings: Settings, registry: Registry, options: Options, name: str = "stream"
) -> Batch:
    """As `submit`, out of a binary stream, which stays open; `name` stands for the file in messages.

    What the stream itself raises, except `OSError`, goes through.
    """
    options.check()
    with open_stream(stream, name) as opened:
        return _submit(opened, store, settings, registry, options, None)


def submit_bytes(
    data: bytes, store: Store, settings: Settings, registry: Registry, options: Options, name: str = "inline"
) -> Batch:
    """As `submit`, out of a file's content."""
    return submit_stream(io.BytesIO(data), store, settings, registry, options, name)


def _submit(
    source: Source, store: Store, settings: Settings, registry: Registry, options: Options, progress: Progress | None
) -> Batch:
    recover(store)
    key = options.idempotency_key
    if key is not None and (earlier := find_by_key(store, key)) is not None:
        return _same(earlier, source.skim(progress), source.name) if options.key_names_file else earlier
    with Spool(store) as spool:
        batch = make(source, spool, settings, registry, options, progress)
        published = spool.publish(batch)
    return _same(published, batch.input, source.name) if options.key_names_file else published


def _same(batch: Batch, given: Input, name: str) -> Batch:
    """The batch that has the key of this input; `UsageError` when it was made out of another."""
    if batch.input.digest == given.digest:
        return batch
    raise UsageError(
        f"{name}: is not the file that was submitted under the idempotency key {batch.idempotency_key!a}: "
        f"{batch.id} has blake3 {batch.input.digest} ({batch.input.name}), this one {given.digest}; "
        "use another key for another file"
    )


def make(
    source: Source,
    spool: Spool,
    settings: Settings,
    registry: Registry,
    options: Options,
    progress: Progress | None = None,
) -> Batch:
    """Write the batch's files, all but `batch.json`; raises as `submit` does."""
    cache = cache_mode(options, settings)
    rules = Rules(settings, registry, options.model, options.max_tokens_default)
    # Beside the batch, not in a /tmp that may be memory.
    folder = str(spool.store.local_path(INCOMING)) if isinstance(spool.store, LocalStore) else None
    with Reading(
        source,
        rules,
        skip_invalid=options.skip_invalid,
        progress=progress,
        folder=folder,
        report_file=options.report_file,
    ) as reading:
        with _plan_writer(spool) as writer:
            reading.run(writer)
            if reading.fatal is not None or not options.skip_invalid:
                report = reading.report()
                if report.error_count:
                    raise Rejected(_message(source.name, reading.fatal, report), report)
        model = rules.decide_default()
        if options.skip_invalid:
            report = _write_invalid(spool, reading, model)
            if reading.repeats_across:
                writer = _without_repeats(spool, reading, writer)
    now = time.time()
    times = options.times(now)
    return Batch(
        id=spool.id,
        model=model,
        created_at=now,
        shard=shard_of(spool.id, settings.scheduler.shards),
        input=source.facts(),
        requests=report.requests,
        planned=writer.planned,
        invalid=report.error_count,
        cost=writer.cost,
        windows=writer.windows,
        name=options.name,
        metadata=dict(options.metadata),
        timeout_s=options.timeout_s or settings.inference.request_timeout_s,
        cache=cache,
        idempotency_key=options.idempotency_key,
        tenant=options.tenant or "default",
        priority=options.priority or "normal",
        expires_at=times.expires_at,
        not_before=times.not_before,
        run_between=times.run_between,
        retry_of=options.retry_of,
    )


def cache_mode(options: Options, settings: Settings) -> str:
    """The batch's use of the result cache; `UsageError` when it wants one and none is configured."""
    mode = options.cache or settings.cache.mode
    # The embedded fleet, which runs where no broker is configured, brings a cache of its own.
    if mode != "off" and not settings.cache.url and settings.broker.url:
        raise UsageError(
            f"cache: '{mode}' needs a Redis server of the cache's own: set cache.url (BATCHMILL_CACHE_URL)"
        )
    return mode


@contextlib.contextmanager
def _plan_writer(spool: Spool) -> Iterator[PlanWriter]:
    with (
        spool.files.open_write(f"{spool.folder}/{ROWS}") as rows,
        spool.files.open_write(f"{spool.folder}/{PLAN}") as plan,
    ):
        yield PlanWriter(rows, plan)


def _write_invalid(spool: Spool, reading: Reading, model: str) -> Report:
    # Here, as few files need it and it needs numpy, which is a good part of the start of a command.
    from producers.invalid_file import INVALID, INVALID_INDEX, InvalidWriter

    with (
        spool.files.open_write(f"{spool.folder}/{INVALID}") as lines,
        spool.files.open_write(f"{spool.folder}/{INVALID_INDEX}") as index,
    ):
        return reading.report(InvalidWriter(lines, index, spool.id, model))


def _without_repeats(spool: Spool, reading: Reading, made: PlanWriter) -> PlanWriter:
    """Write the plan once more without the rows that turned out to repeat an id of an earlier window.

    Rare (it takes `--skip-invalid` and such a file), so it costs nothing to files that have none.
    """
    from common.plan_reader import PlanReader

    reader = PlanReader(spool.store, spool.folder, made.planned)
    decode = msgspec.msgpack.Decoder(Row).decode
    repeats = reading.repeats()
    repeat = next(repeats, None)
    with _plan_writer(spool) as writer:
        for window in made.windows:
            dropped: set[int] = set()
            while repeat is not None and repeat.index < window.index_end:
                dropped.add(repeat.index)
                repeat = next(repeats, None)
            records = reader.plan(window.pos_start, window.pos_end)
            kept = [n for n, index in enumerate(records["index"].tolist()) if index not in dropped]
            rows = map(decode, reader.some_rows(records, kept))
            writer.copy(rows, records, kept, window.index_start, window.index_end)
    return writer


def _message(name: str, fatal: str | None, report: Report) -> str:
    where = f"; all of them: {report.report_file}" if report.report_file else ""
    if fatal is not None:
        return f"{name}: {fatal}; nothing was submitted" + where.replace("all of them", "faults found until then")
    first = report.errors[0]
    place = f"{first.field}: " if first.field else ""
    return (
        f"{name}: {report.error_count} of {report.requests} requests are not valid, nothing was submitted; "
        f"first, line {first.line}: {place}{first.reason}{where}. Fix them, or use --skip-invalid"
    )
