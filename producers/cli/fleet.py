"""`producers fleet up|status|down`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import msgspec
from rich.markup import escape
from rich.table import Table

from common import addresses, exits, say
from common.errors import BatchmillError, Unreachable, UsageError
from common.store import open_store
from producers import embedded
from producers.attendant import PROBLEM_S, Hold
from producers.batch_view import standing
from producers.cli import surroundings, wording
from producers.embedded import Record

#: Stay until told to end.
FOR_GOOD = -1.0
#: Seconds between two looks at a worker that is not ready.
POLL_S = 0.2


def up(*, model: str | None, as_json: bool) -> int:
    """Bring the fleet up, to stay, and wait until the model's worker is ready."""
    settings = surroundings.load_settings()
    registry = surroundings.load_registry(settings)
    if settings.broker.url is not None:
        raise UsageError("broker.url is set, so this machine uses that fleet; unset it to use the embedded one")
    wanted = registry.resolve(model or settings.inference.default_model)
    with embedded.ensure(settings, registry, wanted, linger_s=FOR_GOOD, say=say.err) as fleet:
        if fleet.notice is not None:
            say.err(f"producers: warning: {fleet.notice}")
        until_ready(fleet, say.err)
    return show(as_json=as_json)


def until_ready(
    fleet: Hold,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for the worker of the model that was asked for; `Unreachable` when there will be none."""
    said = ""
    trouble_since: float | None = None
    while True:
        worker = fleet.worker_state()
        if worker.state == "ready":
            return
        problem = fleet.problem()
        if problem is None:
            trouble_since = None
        elif trouble_since is None:
            trouble_since = clock()
        elif clock() - trouble_since >= PROBLEM_S:
            raise Unreachable(problem)
        line = worker.detail or f"{worker.state} a worker of {worker.model}"
        if line != said and worker.state != "failed":
            tell(line)
            said = line
        pause(POLL_S)


def down(*, now: bool, as_json: bool) -> int:
    """End the fleet; unfinished batches wait in the store."""
    settings = surroundings.load_settings()
    ended = embedded.down(drain_s=settings.inference.drain_s, kill_now=now)
    if as_json:
        say.json({"ended": ended})
    else:
        say.out("the fleet has ended" if ended else "no fleet was running")
    return exits.ANSWERED


def show(*, as_json: bool) -> int:
    """What runs; exit code 0 while it does, 3 when it does not."""
    record = embedded.status()
    seen = Seen(**msgspec.structs.asdict(record))
    if record.store:
        with contextlib.suppress(BatchmillError):
            there = standing(open_store(record.store, make=False))
            seen.batches, seen.reasons = there.batches, there.reasons
    seen.store = addresses.shown(record.store)
    if as_json:
        say.json(seen)
    else:
        say.render(card(seen, time.time()))
    return exits.ANSWERED if record.state in ("starting", "up", "stopping") else exits.UNREACHABLE


class Seen(Record, kw_only=True):
    """The record, and what is in the fleet's store."""

    #: Unfinished batches; null: the store does not say.
    batches: int | None = None
    #: Why those wait that do not move (as the `reason` of a batch) → how many of them.
    reasons: dict[str, int] = msgspec.field(default_factory=dict)


def card(record: Seen, now: float) -> Table:
    """The fleet as rows of name and value."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    running = record.state in ("starting", "up", "stopping")
    grid.add_row("fleet", record.state)
    if record.problem:
        grid.add_row("", escape(wording.plain(record.problem)))
    for process in record.processes:
        again = f", started {wording.number(process.restarts, 'time')} again" if process.restarts else ""
        grid.add_row(escape(process.name), f"pid {process.pid}{again}")
    for worker in record.workers:
        detail = f": {worker.detail}" if worker.detail else ""
        grid.add_row("model", escape(wording.plain(f"{worker.model} {worker.state}{detail}")))
    if record.batches is not None:
        grid.add_row("batches", f"{record.batches:,} unfinished")
    for reason, count in sorted(record.reasons.items()):
        grid.add_row("", escape(wording.plain(f"{count:,} × {wording.cause(reason)}")))
    if running and record.started_at:
        grid.add_row("up for", wording.ago(now - record.started_at))
    if running and record.ends_at is not None:
        grid.add_row("ends in", f"{wording.ago(record.ends_at - now)} if nothing is asked of it")
    if record.store:
        grid.add_row("store", escape(record.store))
    grid.add_row("logs", escape(record.logs))
    return grid
