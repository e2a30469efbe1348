"""The coordinator on real brokers, with a worker that has no engine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from common.settings import Settings
from common.store import Store, open_store
from producers.coordinator.service import Service
from tests.support.coordinators import (
    FakeWorker,
    check_outputs,
    make_batch,
    wait_status,
)


class Running:
    """A coordinator in a thread of this process."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._stop = threading.Event()
        self.service = Service(settings, store, 0, self._stop)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as exc:
            self.error = exc

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def coordinating(settings: Settings, store: Store) -> Iterator[Running]:
    running = Running(settings, store)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def store(fleet_settings: Settings) -> Store:
    assert fleet_settings.store.url is not None
    return open_store(fleet_settings.store.url)


def test_answers_a_batch(fleet_settings: Settings, store: Store) -> None:
    batch = make_batch(store, 1000)
    with coordinating(fleet_settings, store), FakeWorker(fleet_settings):
        status = wait_status(store, batch, "completed")
    assert status.request_counts.completed == 1000
    check_outputs(store, batch)
    assert store.list("active/0") == []
