"""`producers submit`: intake, then the fleet where there is none, then following."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from common import exits, say
from common.registry import Registry
from common.settings import Settings
from common.store import Store
from producers import intake
from producers.batch import Batch
from producers.batch_view import BatchView, look
from producers.cli import surroundings, wording
from producers.cli.reading import reading
from producers.cli.validate import refusals_told
from producers.cli.watch import default_folder, output_again, running_fleet, tell, to_the_end
from producers.intake import Options
from producers.outputs import check_folder
from producers.reachability import check_fleet
from producers.schedule import opens, run_window


@dataclass(frozen=True)
class Wish:
    """The options of `submit` as given."""

    source: str
    model: str | None
    name: str | None
    metadata: list[str]
    detach: bool
    output: Path | None
    max_tokens_default: int | None
    skip_invalid: bool
    cache: str | None
    timeout_s: float | None
    idempotency_key: str | None
    priority: str | None
    tenant: str | None
    completion_window: str | None
    not_before: str | None
    run_between: str | None
    as_json: bool


def submit(wish: Wish) -> int:
    """Enqueue a file and follow it; the batch's outcome is the exit code."""
    settings = surroundings.load_settings()
    registry = surroundings.load_registry(settings)
    options = options_of(wish)
    options.check()
    # Before anything is enqueued: answers that took hours must have a place to go. Who detaches without naming one has
    # not chosen it yet.
    if wish.output is not None or not wish.detach:
        check_folder(wish.output or default_folder("batch"))
    store = surroundings.store_of(settings)
    check_fleet(settings, store, lambda: registry, say.err)
    batch = take_in(wish, options, store, settings, registry)
    warn_of_hours(batch)
    seen = look(store, batch.id)
    if not wish.detach:
        return to_the_end(store, seen, settings, wish.output, as_json=wish.as_json)
    with running_fleet(settings, seen):
        return let_go(seen, wish.output, as_json=wish.as_json)


def options_of(wish: Wish) -> Options:
    """What intake wants to know; `UsageError` for what cannot be meant."""
    return Options(
        model=wish.model,
        name=wish.name,
        metadata=surroundings.pairs(wish.metadata),
        skip_invalid=wish.skip_invalid,
        max_tokens_default=wish.max_tokens_default,
        cache=wish.cache,
        timeout_s=wish.timeout_s,
        idempotency_key=wish.idempotency_key,
        priority=wish.priority,
        tenant=wish.tenant,
        completion_window=wish.completion_window,
        not_before=wish.not_before,
        run_between=wish.run_between,
    )


def take_in(wish: Wish, options: Options, store: Store, settings: Settings, registry: Registry) -> Batch:
    """The batch that intake made of the file; faults are told before its `InvalidInput` goes on."""
    began = time.time()
    try:
        with refusals_told(wish.source, as_json=wish.as_json), reading(wish.source) as progress:
            batch = intake.submit(wish.source, store, settings, registry, options, progress)
    except KeyboardInterrupt:
        say.err("\nstopped while reading; nothing was enqueued")
        raise
    if batch.created_at < began and options.idempotency_key is not None:
        say.err(f"{batch.id}: submitted before under this idempotency key")
    skipped = f" ({batch.invalid:,} invalid)" if batch.invalid else ""
    say.err(f"{batch.id}: {wording.number(batch.requests, 'request')}{skipped} for {batch.model}")
    return batch


def warn_of_hours(batch: Batch) -> None:
    """Say so when a batch expires before any of it may be sent."""
    if batch.expires_at is not None:
        window = None if batch.run_between is None else run_window(batch.run_between)
        if opens(batch.created_at, batch.not_before, window) >= batch.expires_at:
            say.err("producers: warning: its completion window ends before its hours begin; nothing of it will be sent")


def let_go(seen: BatchView, output: Path | None, *, as_json: bool) -> int:
    """Leave the batch to the fleet."""
    if as_json:
        tell(seen, None, as_json=True)
    else:
        where = output_again(output)
        say.out(seen.id)
        say.err(f"  follow it    producers watch {seen.id}{where}")
        say.err(f"  its answers  producers results {seen.id}{where}")
    return exits.ANSWERED
