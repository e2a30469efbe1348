"""`producers status`, `list` and `cancel`: short questions to the store."""

from __future__ import annotations

import getpass
import socket
import time

from rich.markup import escape
from rich.table import Table

from common.store import Store
from producers.batch_view import BatchView, ask_cancel, look, recent
from producers.cli import say, surroundings, wording

#: Columns that a list needs for ids that are whole.
NARROWEST = 80
#: Columns that everything but the name takes at most.
_BESIDE_NAME = 68
_COLOURS = {"completed": "green", "failed": "red", "cancelled": "yellow", "expired": "yellow"}


def status(batch_id: str, *, as_json: bool) -> int:
    """Where a batch stands."""
    seen = look(_store(), batch_id)
    if as_json:
        say.json(seen)
    else:
        say.render(card(seen, time.time()))
    return 0


def show(*, limit: int | None, as_json: bool) -> int:
    """The newest batches."""
    store = _store()
    found = recent(store, limit)
    if as_json:
        say.json({"object": "list", "data": found})
    elif found:
        # A narrower terminal wraps the lines: an id that was cut could not be copied.
        width = max(NARROWEST, say.console().width)
        say.render(listing(found, time.time(), width), width=width)
    else:
        say.err(f"no batches in {store.url}")
    return 0


def cancel(batch_id: str, *, as_json: bool) -> int:
    """Ask for a batch to be cancelled."""
    before = ask_cancel(_store(), batch_id, by=f"{_user()}@{socket.gethostname()}")
    if as_json:
        say.json({"id": batch_id, "asked": not before.final, "status": before.status})
    elif before.final:
        say.out(f"{batch_id} is {wording.status(before)} already; nothing to cancel")
    else:
        say.out(f"{batch_id}: asked to cancel; what is answered is kept (producers watch {batch_id})")
    if before.reason == "no_coordinator":
        say.err("producers: warning: no coordinator runs; it will cancel the batch once one is back")
    return 0


def card(seen: BatchView, now: float) -> Table:
    """One batch as rows of name and value."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    counts, usage = seen.request_counts, seen.usage
    tokens = f"{usage.prompt_tokens:,} read ({usage.cached_tokens:,} cached), {usage.completion_tokens:,} written"
    rows: list[tuple[str, str | None]] = [
        ("id", seen.id),
        ("name", _users(seen.name)),
        ("status", _coloured(seen)),
        ("", _users(wording.reason(seen))),
        ("model", escape(seen.model)),
        ("input", f"{_users(seen.input.name)} ({seen.input.bytes:,} bytes)"),
        ("requests", f"{counts.total:,}: {counts.completed:,} answered, {counts.failed:,} failed"),
        ("in flight", f"{seen.in_flight:,}" if seen.in_flight else None),
        ("sent again", f"{seen.resent:,}" if seen.resent else None),
        ("tokens", tokens),
        ("cache hits", f"{usage.cache_hits:,}" if usage.cache_hits else None),
        ("metadata", _users(", ".join(f"{k}={v}" for k, v in seen.metadata.items()))),
        ("submitted", f"{wording.ago(now - seen.created_at)} ago"),
        ("took", _took(seen, now)),
    ]
    for name, value in rows:
        if value is not None:
            grid.add_row(name, value)
    return grid


def listing(found: list[BatchView], now: float, width: int) -> Table:
    """Batches as a table that fits `width` (≥ 80) columns: only names are cut, since ids are what people copy."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("id", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for name in ("done", "of", "failed", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("name", no_wrap=True, overflow="ellipsis", max_width=max(8, width - _BESIDE_NAME))
    for seen in found:
        counts = seen.request_counts
        table.add_row(
            seen.id,
            _coloured(seen),
            f"{wording.percent(seen)}%",
            wording.compact(counts.total),
            wording.compact(counts.failed) if counts.failed else "",
            wording.ago(now - seen.created_at).replace(" min", "m").replace(" ", ""),
            _users(seen.name) or "",
        )
    return table


def _users(text: str | None) -> str | None:
    """What someone else wrote, safe to show: no markup, no control characters; None when there is nothing."""
    return escape(wording.plain(text)) if text else None


def _coloured(seen: BatchView) -> str:
    colour = _COLOURS.get(seen.status)
    text = wording.status(seen)
    return f"[{colour}]{text}[/{colour}]" if colour else text


def _took(seen: BatchView, now: float) -> str | None:
    if seen.started_at is None:
        return None
    span = (seen.finished_at or now) - seen.started_at
    speed = f" ({wording.rate(seen.answered / span, 'requests/s')})" if span > 0 and seen.answered else ""
    return f"{wording.took(span)}{speed}"


def _store() -> Store:
    return surroundings.store_of(surroundings.load_settings())


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
