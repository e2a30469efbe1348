"""An object store as store: the ledger lies on a disk of the coordinator's host, and is lost with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from common import settings as settings_module
from common.settings import Settings
from common.store import Store, open_store
from producers.batch import Command
from tests.support.coordinators import FakeWorker, check_outputs, make_batch, status_of, wait_status
from tests.support.ports import PATIENCE_S, wait_until
from tests.support.processes import Process, Processes
from tests.support.s3 import new_bucket, s3_env, s3_server

pytestmark = pytest.mark.parametrize("broker", ["redis"], indirect=True)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def env(fleet_env: dict[str, str], endpoint: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in s3_env(endpoint).items():
        monkeypatch.setenv(name, value)
    own = {
        "BATCHMILL_STORE_URL": f"s3://{new_bucket()}/fleet",
        "BATCHMILL_STORE_WAL_COPY_S": "0.3",
        "BATCHMILL_SCHEDULER_LEASE_S": "2",
        "BATCHMILL_SCHEDULER_UNCLAIMED_S": "2",
        "BATCHMILL_SCHEDULER_CHUNK_REQUESTS": "50",
        "BATCHMILL_SCHEDULER_QUEUE_SIZE": "400",
        "BATCHMILL_SCHEDULER_TAKEOVER_S": "3",
        "BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S": "4",
    }
    return fleet_env | s3_env(endpoint) | own


@pytest.fixture
def settings(env: dict[str, str]) -> Settings:
    return settings_module.load(env=env)


@pytest.fixture
def store(settings: Settings) -> Store:
    assert settings.store.url is not None
    return open_store(settings.store.url)


def start(processes: Processes, env: dict[str, str], host: Path) -> Process:
    """A coordinator on a host of its own: a disk for the log that no other has."""
    return processes.coordinator(env | {"BATCHMILL_STORE_WAL_DIR": str(host)})


def copied_bytes(store: Store) -> int:
    """Bytes of the log that are in the store."""
    names = [f"wal/0/{name}" for name in store.list("wal/0") if not name.endswith(".manifest")]
    return sum(store.size(name) for name in names)


def test_a_host_that_is_lost_with_its_log_costs_only_what_was_not_copied(
    settings: Settings, store: Store, env: dict[str, str], processes: Processes, tmp_path: Path
) -> None:
    batch, other = make_batch(store, 2000), make_batch(store, 400)
    with FakeWorker(settings, hold_after=1000) as worker:
        first = start(processes, env, tmp_path / "host-a")
        assert worker.holding.wait(PATIENCE_S)
        wait_status(store, other, "completed", "in_progress")
        command = Command(command="reprioritize", at=time.time(), priority="high")
        store.put_atomic(f"control/{batch.id}/01.json", msgspec.json.encode(command))
        # 1000 lines of a hundred bytes or more.
        wait_until(lambda: copied_bytes(store) > 100_000, 30, "what was answered is in the store")
        copied = len(store.list("wal/0"))
        first.kill()
        second = start(processes, env, tmp_path / "host-b")
        second.wait_line("log_fetched", 30)
        assert int(second.wait_line(r"ledger_read.* records=(\d+)", 30).group(1)) > 3
        worker.gate.set()
        for one in (batch, other):
            assert wait_status(store, one, "completed", timeout=120).request_counts.failed == 0
            check_outputs(store, one)
        wait_until(lambda: len(store.list("wal/0")) < copied, 30, "what is needed no more is removed")
        assert second.stop() == 0
        assert store.list("control") == []
        assert [n for n in store.list("wal/0") if not n.endswith(".manifest")] == []
    # A clean end leaves everything to whoever comes next, and what was copied was not asked again.
    assert len(worker.answered) < 2 * 2400
    assert status_of(store, batch).reason is None


def test_a_clean_end_leaves_all_of_the_log_to_another_host(
    settings: Settings, store: Store, env: dict[str, str], processes: Processes, tmp_path: Path
) -> None:
    batch = make_batch(store, 1000)
    with FakeWorker(settings, hold_after=300) as worker:
        first = start(processes, env | {"BATCHMILL_STORE_WAL_COPY_S": "3600"}, tmp_path / "host-a")
        assert worker.holding.wait(PATIENCE_S)
        assert first.stop() == 0
        logged = status_of(store, batch).request_counts.completed
        assert store.list("wal/0") != []
        second = start(processes, env, tmp_path / "host-b")
        second.wait_line("ledger_read", 30)
        worker.gate.set()
        wait_status(store, batch, "completed", timeout=120)
        assert second.stop() == 0
    check_outputs(store, batch)
    assert len(worker.answered) <= 2000 - logged
