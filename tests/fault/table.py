"""The table of the fault suite: printed at the end of a run, kept in tests/artifacts/, copied into docs/reliability.md.

`python -m tests.fault.table` puts the last whole run's table into the page.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., None])

PROPERTY = "fault"
ROOT = Path(__file__).resolve().parents[2]
ARTIFACT = ROOT / "tests" / "artifacts" / "faults.json"
PAGE = ROOT / "docs" / "reliability.md"
_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"


class Row(NamedTuple):
    """One case on one broker. None: it never came so far."""

    number: str
    fault: str
    broker: str
    run_twice: int | None
    recovered_s: float | None
    verdict: str


def case(
    number: str, title: str, *, quick: str = "", timeout: float = 500, brokers: tuple[str, ...] = ("redis", "rabbitmq")
) -> Callable[[Test], Test]:
    """Marks a test as a case of the suite: on both brokers, one test each.

    `quick`: the broker (or both, with a space between) on which it belongs to the subset that `make test` runs; on the
    others it is `slow`.
    """

    def decorate(test: Test) -> Test:
        chosen = quick.split()
        values = [pytest.param(b, marks=() if b in chosen else pytest.mark.slow) for b in brokers]
        for mark in (
            pytest.mark.parametrize("broker", values, indirect=True),
            pytest.mark.fault(number, title),
            pytest.mark.timeout(timeout),
        ):
            test = mark(test)
        return test

    return decorate


def rows(reports: Iterable[Any]) -> list[Row]:
    """The rows that travelled with reports, in the order of the cases."""
    found = [Row(**value) for report in reports for name, value in report.user_properties if name == PROPERTY]
    return sorted(found, key=lambda row: (int("".join(filter(str.isdigit, row.number))), row.number, row.broker))


def markdown(found: Iterable[Row]) -> str:
    """The table."""
    lines = ["| | fault | broker | requests run twice | seconds to recover | verdict |", "|---|---|---|---|---|---|"]
    for row in found:
        twice = "" if row.run_twice is None else str(row.run_twice)
        seconds = "" if row.recovered_s is None else f"{row.recovered_s:.1f}"
        lines.append(f"| {row.number} | {row.fault} | {row.broker} | {twice} | {seconds} | {row.verdict} |")
    return "\n".join(lines)


def machine() -> str:
    """What the figures were measured on."""
    names = [f"{name} {version(name)}" for name in ("celery", "kombu", "redis")]
    server = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=False).stdout
    names.append(f"redis-server {server.partition('v=')[2].partition(' ')[0]}")
    rabbit = sorted(path.name for path in Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*"))
    names += [name.replace("rabbitmq_server-", "RabbitMQ ") for name in rabbit]
    return f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, {', '.join(names)}"


def summarise(reporter: Any) -> None:
    """Print the table of this run, if cases ran, and keep it."""
    found = rows(r for key in ("passed", "failed") for r in reporter.stats.get(key, ()) if r.when == "call")
    if not found:
        return
    reporter.section("faults")
    reporter.write_line(markdown(found))
    ARTIFACT.parent.mkdir(exist_ok=True)
    kept = {"machine": machine(), "rows": [row._asdict() for row in found]}
    ARTIFACT.write_text(json.dumps(kept, indent=1) + "\n")
    ARTIFACT.with_suffix(".md").write_text(markdown(found) + "\n")


def splice(page: str, kept: dict[str, Any]) -> str:
    """The page with the measured table in place of the one it has."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    table = markdown(Row(**row) for row in kept["rows"])
    return f"{before}{_BEGIN}\nMeasured on {kept['machine']}.\n\n{table}\n{_END}{after}"


def main() -> int:
    """Put the last run's table into the page."""
    kept = json.loads(ARTIFACT.read_text())
    if any(row["verdict"] != "held" for row in kept["rows"]) or not any(row["number"] == "0" for row in kept["rows"]):
        print("the last run had failures, or was not of the whole suite; the page is left as it is", file=sys.stderr)
        return 1
    PAGE.write_text(splice(PAGE.read_text(), kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
