"""Fixtures of the fault suite, and the record of every case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.fleet import Fleet
from tests.fault.table import PROPERTY, Row
from tests.support.brokers import Broker
from tests.support.processes import Processes

_CASE = pytest.StashKey[tuple[str, str, str, Fleet]]()


@pytest.fixture
def fleet(tmp_path: Path, broker: Broker, processes: Processes, request: pytest.FixtureRequest) -> Fleet:
    """A fleet that is not started yet."""
    made = Fleet(tmp_path, broker, processes)
    number, title = request.node.get_closest_marker("fault").args
    request.node.stash[_CASE] = (number, title, broker.kind, made)
    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Put the case's row on its report, which travels to whoever prints the table."""
    report: Any = yield
    case = item.stash.get(_CASE, None)
    if case is not None and report.when == "call":
        number, title, broker, fleet = case
        cost = fleet.measured
        row = Row(
            number,
            title,
            broker,
            cost.run_twice if cost else None,
            cost.recovered_s if cost else None,
            "held" if report.passed else "FAILED",
        )
        report.user_properties.append((PROPERTY, row._asdict()))
    return report  # type: ignore[no-any-return]


FleetFactory = Callable[..., Fleet]
