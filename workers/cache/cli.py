"""`workers cache stats|export|import|warm|clear`: the result cache, for people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from common import say
from common.errors import UsageError
from common.grammar import Group

if TYPE_CHECKING:
    from workers.cache.commands import Stats

json_option = click.option("--json", is_flag=True, help="print JSON on stdout")
file_argument = click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))

_POLICIES = {"evicts": "the server pushes out what is old", "counts": "the cache counts and pushes out what is old"}


@click.group(name="cache", cls=Group)
def app() -> None:
    """The result cache: stats, export, import, warm, clear."""


@app.command()
@json_option
def stats(json: bool) -> None:
    """Show what the cache holds, and how often it answered."""
    from workers.cache import commands

    found = commands.stats()
    if json:
        _print_json(found)
    else:
        say.out("\n".join(_table(found)))


@app.command("export")
@file_argument
@click.option("--model", help="only entries of NAME or NAME@VERSION")
@json_option
def export_entries(file: Path, model: str | None, json: bool) -> None:
    """Write the cache's entries to FILE, which appears once it is whole; - for stdout."""
    from workers.cache import commands

    if json and file == commands.STREAM:
        raise UsageError("FILE - and --json both want stdout; choose one")
    done = commands.export(file, model)
    if json:
        _print_json(done)
        return
    tell = say.err if file == commands.STREAM else say.out
    tell(f"{file}: {done.entries:,} entries, {done.bytes:,} bytes")
    if done.unreadable:
        say.err(f"{done.unreadable:,} could not be read: signed with another key, or none of ours; they were left out")


@app.command("import")
@file_argument
@json_option
def import_entries(file: Path, json: bool) -> None:
    """Put the entries of an exported FILE (- for stdin) into the cache. A damaged file changes nothing."""
    from workers.cache import commands

    done = commands.import_(file)
    if json:
        _print_json(done)
        return
    there = "all of them" if done.written == done.entries else f"{done.written:,} of them"
    say.out(f"{file}: {done.entries:,} entries, {there} in the cache now")
    _say_pushed_out(done.pushed_out, done.capacity_bytes)


@app.command()
@click.option("--from", "batch", metavar="BATCH_ID", required=True, help="a batch that has ended")
@json_option
def warm(batch: str, json: bool) -> None:
    """Put the determined answers of a finished batch into the cache."""
    from workers.cache import commands

    done = commands.warm(batch)
    if json:
        _print_json(done)
        return
    there = "all of them" if done.written == done.determined else f"{done.written:,} of them"
    say.out(f"{batch}: {done.determined:,} of {done.lines:,} answers are determined, {there} in the cache now")
    _say_pushed_out(done.pushed_out, done.capacity_bytes)
    if done.too_large:
        say.err(f"{done.too_large:,} are larger than an entry may be and were left out")
    if done.unmarked:
        say.err(f"{done.unmarked:,} lines carry no fingerprint (an older release) and were left out")


@app.command()
@click.option("--model", help="NAME or NAME@VERSION")
@click.option("--all", "everything", is_flag=True, help="all models")
@json_option
def clear(model: str | None, everything: bool, json: bool) -> None:
    """Remove the entries of a model. Workers forget what they hold of it at once."""
    if (model is None) is not everything:
        raise UsageError("name the model to clear with --model, or say --all")
    from workers.cache import commands

    count = commands.clear(model)
    if json:
        _print_json({"model": model, "removed": count})
    else:
        say.out(f"{model or 'all models'}: {count:,} entries removed")


def _say_pushed_out(count: int, capacity: int) -> None:
    if count:
        say.out(
            f"{count:,} were pushed out again by what came after them: the cache has room for {_mb(capacity)}. Raise "
            "cache.capacity_gb, and maxmemory where its server has a lower one (`workers cache stats`)"
        )


def _table(found: Stats) -> list[str]:
    share = found.bytes / found.capacity_bytes if found.capacity_bytes else 0.0
    said = [
        f"server      {found.url} ({_POLICIES[found.policy]})",
        f"entries     {found.entries:,}",
        f"memory      {_mb(found.bytes)} of {_mb(found.capacity_bytes)} ({share:.0%})",
    ]
    limit = found.server_limit_bytes
    if found.policy == "counts" and limit:
        share = found.server_bytes / limit
        said.append(
            f"            {_mb(found.server_bytes)} of {_mb(limit)} ({share:.0%}) on the whole server (maxmemory)"
        )
    said.append(f"pushed out  {found.evicted:,}")
    if found.models:
        width = max(len("model"), *map(len, found.models))
        said += ["", f"{'model':<{width}}  {'hits':>12}  {'misses':>12}  {'hit rate':>8}  {'written':>12}"]
        for model, figures in found.models.items():
            looked = figures.hits + figures.misses
            rate = f"{figures.hits / looked:.1%}" if looked else "-"
            said.append(
                f"{model:<{width}}  {figures.hits:>12,}  {figures.misses:>12,}  {rate:>8}  {figures.written:>12,}"
            )
    return said


def _mb(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MB"


def _print_json(value: Any) -> None:
    say.json(value)
