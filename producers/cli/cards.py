"""Batches as people see them: `card` of one, `listing` of many. Whoever asks for JSON needs no rich."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from producers.batch_view import BatchView, TokenUsage
from producers.cli import wording

#: Columns that a list needs for ids that are whole.
NARROWEST = 80
#: Columns that everything but the name takes at most.
_BESIDE_NAME = 68
_COLOURS = {"completed": "green", "failed": "red", "cancelled": "yellow", "expired": "yellow"}


def card(seen: BatchView, now: float, *, embedded: bool = False) -> Table:
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
        ("", _users(wording.reason(seen, embedded=embedded))),
        ("model", escape(seen.model)),
        ("priority", seen.priority if seen.priority != "normal" else None),
        ("tenant", _users(seen.tenant) if seen.tenant != "default" else None),
        ("deadline", _deadline(seen, now)),
        ("not before", wording.when(seen.not_before, now) if seen.not_before is not None else None),
        ("runs", seen.run_between),
        ("retry of", seen.retry_of),
        ("input", f"{_users(seen.input.name)} ({seen.input.bytes:,} bytes)"),
        ("requests", f"{counts.total:,}: {counts.completed:,} answered, {counts.failed:,} failed"),
        ("in flight", f"{seen.in_flight:,}" if seen.in_flight else None),
        ("sent again", f"{seen.resent:,}" if seen.resent else None),
        ("tokens", tokens),
        ("cache hits", _hits(usage)),
        ("shared", f"{usage.shared:,} answered by equal requests' answers" if usage.shared else None),
        # Of everybody who uses it, not of this batch.
        ("cache server", _cache(seen)),
        ("metadata", _users(", ".join(f"{k}={v}" for k, v in seen.metadata.items()))),
        ("submitted", f"{wording.ago(now - seen.created_at)} ago"),
        ("took" if seen.finished_at is not None else "so far", _took(seen, now)),
    ]
    for name, value in rows:
        if value is not None:
            grid.add_row(name, value)
    return grid


def listing(found: list[BatchView], now: float, width: int, *, embedded: bool = False) -> Group:
    """Batches as a table that fits `width` (≥ 80) columns: only names are cut, since ids are what people copy.

    Below a batch stands what sets it apart, where something does: why it waits, its deadline, priority and tenant.
    """
    parts: list[RenderableType] = []
    table = _columns(width, header=True)
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
        notes = wording.standing(seen, now)
        if not seen.final and (why := wording.reason(seen, embedded=embedded)) is not None:
            notes.insert(0, wording.plain(why.partition(";")[0]))
        if notes:
            note = Text(f"  {', '.join(notes)}", style="dim", no_wrap=True, overflow="ellipsis")
            parts += [table, note]
            table = _columns(width, header=False)
    return Group(*parts, table)


def _columns(width: int, *, header: bool) -> Table:
    """A table with columns of widths that do not follow from its rows, so that several stand below each other."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", show_header=header)
    table.add_column("id", no_wrap=True, width=32)
    table.add_column("status", no_wrap=True, width=11)
    for name, size in (("done", 4), ("of", 5), ("failed", 6), ("age", 4)):
        table.add_column(name, justify="right", no_wrap=True, width=size)
    table.add_column("name", no_wrap=True, overflow="ellipsis", max_width=max(8, width - _BESIDE_NAME))
    return table


def _hits(usage: TokenUsage) -> str | None:
    if not usage.cache_hits + usage.cache_misses:
        return None
    # Where the cache is read at all, those that then shared an answer were looked up in vain as well.
    asked = usage.cache_hits + usage.cache_misses + usage.shared
    return f"{usage.cache_hits:,} of {asked:,} asked for ({usage.cache_hits / asked:.0%}), {usage.cache_bytes:,} bytes"


def _cache(seen: BatchView) -> str | None:
    if seen.cache is None:
        return None
    held, room = (f"{size / (1 << 20):,.1f} MB" for size in (seen.cache.bytes, seen.cache.capacity_bytes))
    return f"{seen.cache.entries:,} entries, {held} of {room}, {seen.cache.evicted:,} pushed out in all"


def _users(text: str | None) -> str | None:
    """What someone else wrote, safe to show: no markup, no control characters; None when there is nothing."""
    return escape(wording.plain(text)) if text else None


def _coloured(seen: BatchView) -> str:
    colour = _COLOURS.get(seen.status)
    text = wording.status(seen)
    return f"[{colour}]{text}[/{colour}]" if colour else text


def _deadline(seen: BatchView, now: float) -> str | None:
    if seen.expires_at is None:
        return None
    told = wording.when(seen.expires_at, now)
    return told if seen.final else f"{told} ({wording.ahead(seen.expires_at - now)})"


def _took(seen: BatchView, now: float) -> str | None:
    if seen.started_at is None:
        return None
    span = (seen.finished_at or now) - seen.started_at
    speed = f" ({wording.rate(seen.answered / span, 'requests/s')})" if span > 0 and seen.answered else ""
    return f"{wording.took(span)}{speed}"
