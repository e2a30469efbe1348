"""Fixtures of tests that run real worker processes on real brokers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.settings import Settings
from common.store import Store, open_store
from tests.conftest import ECHO_MODEL
from tests.support.chunks import Dispatch, StartWorker
from tests.support.processes import Process, Processes

READY = r"ready\.$"


@pytest.fixture
def store(fleet_settings: Settings) -> Store:
    """The fleet's store."""
    assert fleet_settings.store.url is not None
    return open_store(fleet_settings.store.url)


@pytest.fixture
def dispatch(fleet_settings: Settings) -> Iterator[Dispatch]:
    """The coordinator's side."""
    side = Dispatch(fleet_settings)
    yield side
    side.close()


@pytest.fixture
def start_worker(processes: Processes, fleet_env: dict[str, str]) -> StartWorker:
    """Starts a worker (without supervisor unless asked) and waits until it consumes; keywords are its environment."""

    def start(*argv: str, supervised: bool = False, wait: bool = True, **env: Any) -> Process:
        given = {k: str(v) for k, v in env.items()}
        extra = argv if supervised else ("--no-supervisor", *argv)
        process = processes.worker(fleet_env | given, ECHO_MODEL, *extra)
        if wait:
            process.wait_line(READY, 60)
        return process

    return start
