"""`workers tune`: a short sweep over the numbers of the engine's scheduler."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from common import registry as registries
from common import say
from common import settings as setting_files
from common.errors import UsageError
from common.interrupts import terminated_like_interrupted

if TYPE_CHECKING:
    from workers.tune.point import Measured

_HEAD = ("max_num_seqs", "max_num_batched_tokens", "requests/s", "tokens/s", "full", "KV cache", "preempted")


@click.command()
@click.option(
    "--sample",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Requests like those to come, one JSON object a line.",
)
@click.option("--model", help="Model to tune: NAME or NAME@VERSION.", show_default="the default model")
@click.option(
    "--requests",
    metavar="N",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Use the first N requests of the sample.",
)
@click.option("--max-num-seqs", metavar="N,…", help="Values to try.", show_default="half, the same, twice")
@click.option("--max-num-batched-tokens", metavar="N,…", help="Values to try.", show_default="the same, twice")
@click.option(
    "--chunk-requests", metavar="N,…", help="Sizes of chunks to try.", show_default="as the coordinator has them"
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=1800,
    show_default=True,
    help="Seconds a point may take, its start included.",
)
@click.option("--dry-run", is_flag=True, help="Measure and show; change no file.")
@click.option("--json", is_flag=True, help="Print JSON on stdout.")
def tune(
    sample: Path,
    model: str | None,
    requests: int,
    max_num_seqs: str | None,
    max_num_batched_tokens: str | None,
    chunk_requests: str | None,
    timeout: float,
    dry_run: bool,
    json: bool,
) -> None:
    """Measure which max_num_seqs and max_num_batched_tokens answer a sample fastest, and write them to models.yaml.

    Each point starts an engine of its own, so nothing else should use its devices.
    """
    # Only now, since it imports the worker.
    from workers.tune import edit, sweep
    from workers.tune import sample as samples
    from workers.tune.point import NAMES

    settings, registry = setting_files.load(), registries.load()
    name = registry.resolve(model or settings.inference.default_model)
    entry = registry.get(name)
    now = sweep.present(entry)
    points = sweep.grid(
        now,
        _numbers("--max-num-seqs", max_num_seqs),
        _numbers("--max-num-batched-tokens", max_num_batched_tokens),
        _numbers("--chunk-requests", chunk_requests),
    )
    count = len(samples.read(sample, requests))
    where = Path(registry.where)
    # Why nothing will be written, if so: said before an hour of measuring, which is of use all the same.
    kept: str | None = None
    if dry_run:
        kept = "--dry-run"
    elif settings.inference.engine == "echo":
        kept = f"{where}: stays as it is, since the echo engine computes nothing and its rates are no model's"
    else:
        _check_writable(where)
        kept = edit.fault(where, name, NAMES)
    if kept is not None and not dry_run:
        say.err(f"nothing will be written: {kept}")
    engines = f"{len(points)} engines, one after the other" if len(points) > 1 else "one engine"
    say.err(f"{name}: {engines}, {count} requests of {sample} each")
    lines = _Table(chunks=chunk_requests is not None)
    with terminated_like_interrupted():
        measured = sweep.run(name, points, str(sample), requests, timeout, lambda row: say.err(lines.row(row)))
    found = sweep.best(measured, now)
    if found is None:
        raise UsageError(f"{name}: no engine of the sweep answered the sample; the first said: {measured[0].problem}")
    figures = _figures(found, sample.name, now=datetime.date.today())
    if kept is None:
        try:
            edit.write(where, name, {key: getattr(found.numbers, key) for key in NAMES}, figures)
        except UsageError as exc:
            # It was changed meanwhile; what was measured is said all the same.
            kept = str(exc)
    if json:
        say.json(
            {
                "model": name,
                "sample": str(sample),
                "requests": count,
                "points": [_fields(row) for row in measured],
                "best": _fields(found),
                "written": str(where) if kept is None else None,
                "not_written": kept,
            }
        )
        return
    numbers = ", ".join(f"{key} {getattr(found.numbers, key):,}" for key in NAMES)
    say.out(f"best: {numbers}: {figures}")
    if found.numbers.chunk:
        say.out(f"with chunks of {found.numbers.chunk}: scheduler.chunk_requests in fleet.yaml, for all its models")
    if kept is None:
        say.out(f"written to {where}")
    else:
        say.out("nothing was written (--dry-run)" if dry_run else f"nothing was written: {kept}")


class _Table:
    """Rows as they come, under a head."""

    def __init__(self, *, chunks: bool) -> None:
        self._chunks = chunks
        self._begun = False

    def row(self, row: Measured) -> str:
        """A line, or the head and the first one."""
        numbers = row.numbers
        cells = [f"{numbers.max_num_seqs:,}", f"{numbers.max_num_batched_tokens:,}"]
        if row.problem is None:
            cells += [f"{row.requests_per_s:.2f}", f"{row.tokens_per_s:,.0f}", f"{row.occupancy:.0%}"]
            cells += [f"{row.kv_usage:.0%}", f"{row.preempted:,}"]
        head = list(_HEAD)
        if self._chunks:
            head.insert(2, "chunk")
            cells.insert(2, f"{numbers.chunk:,}")
        line = "  ".join(f"{cell:>{len(title)}}" for cell, title in zip(cells, head, strict=False))
        if row.problem is not None:
            line += f"  {row.problem}"
        elif row.failed:
            line += f"  {row.failed} of {row.failed + row.answered} failed"
        begun, self._begun = self._begun, True
        return line if begun else "  ".join(head) + "\n" + line


def _numbers(option: str, text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise UsageError(f"{option}: '{text[:80]}' is no list of numbers such as 64,128")
    return found


def _check_writable(where: Path) -> None:
    if not os.access(where, os.W_OK) or not os.access(where.resolve().parent, os.W_OK):
        raise UsageError(f"{where}: cannot be written; use --dry-run and set the numbers by hand")


def _figures(row: Measured, sample: str, now: datetime.date) -> str:
    count = row.answered + row.failed
    return (
        f"{now.isoformat()}, {row.requests_per_s:.2f} requests/s, {row.tokens_per_s:,.0f} tokens/s, KV cache used "
        f"up to {row.kv_usage:.0%}, {row.preempted:,} preemptions, {count:,} requests of {ascii(sample)[1:-1]}"
    )


def _fields(row: Measured) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(row)
    numbers = fields.pop("numbers")
    assert isinstance(numbers, dict)
    rates = {"requests_per_s": round(row.requests_per_s, 3), "tokens_per_s": round(row.tokens_per_s, 1)}
    return numbers | fields | rates
