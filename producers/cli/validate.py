"""`producers validate`, and how faults of a file are shown."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from common import exits, say
from producers.cli import surroundings, wording
from producers.cli.reading import reading
from producers.intake import LineError, Options, Rejected, Report
from producers.intake import validate as check


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `validate`, and of a `submit` that was refused. Lines count from 1; `errors` holds the first 100."""

    requests: int
    error_count: int
    errors: list[LineError]


def validate(source: str, *, model: str | None, max_tokens_default: int | None, as_json: bool) -> int:
    """Check a file; the faults are the result, so they go to stdout."""
    settings = surroundings.load_settings()
    registry = surroundings.load_registry(settings)
    options = Options(model=model, max_tokens_default=max_tokens_default)
    with refusals_told(source, as_json=as_json), reading(source) as progress:
        report = check(source, settings, registry, options, progress)
    if as_json:
        say.json(verdict(report))
    else:
        said = faults(source, report)
        summary = f"{source}: {wording.number(report.requests, 'request')}"
        if report.report_file is not None and report.error_count > len(report.errors):
            said.append(f"all of them are in {report.report_file}")
        said.append(f"{summary}, {wording.number(report.error_count, 'fault')}" if said else f"{summary}, all valid")
        say.out("\n".join(said))
    return exits.INVALID if report.error_count else exits.ANSWERED


@contextlib.contextmanager
def refusals_told(source: str, *, as_json: bool) -> Iterator[None]:
    """Tells the faults of a file that is refused inside the block, before the refusal goes on as the error it is."""
    try:
        yield
    except Rejected as exc:
        if as_json:
            say.json(verdict(exc.report))
        else:
            for line in faults(source, exc.report):
                say.err(line)
        raise


def verdict(report: Report) -> Verdict:
    """The report in its public shape."""
    return Verdict(requests=report.requests, error_count=report.error_count, errors=report.errors)


def faults(source: str, report: Report) -> list[str]:
    """One line a fault, `file:line: field: reason`, as compilers write them."""
    said = [f"{source}:{e.line}: {e.field + ': ' if e.field else ''}{wording.plain(e.reason)}" for e in report.errors]
    if report.error_count > len(report.errors):
        said.append(f"{source}: and {report.error_count - len(report.errors):,} more")
    return said
