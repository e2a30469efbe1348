"""Many batches submitted at once: each as one alone would be, whatever stops it in between."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import StoreFull
from common.messages import decode_rows
from common.registry import ModelVersion, Registry
from common.settings import Settings
from common.store import LocalStore, Store, open_store
from producers import intake
from producers.batch import Batch, read_batch
from producers.coordinator.batch_files import BatchFiles
from producers.intake import Options, Rejected, bulk
from tests.unit.test_intake_spool import die_at

MODELS = Registry({"m@1": ModelVersion(source="x")}, {}, "m@1")
SETTINGS = Settings()


def source(number: int, requests: int = 3) -> bytes:
    return b"".join(b'{"custom_id":"b%d-%d","body":{"prompt":"hi"}}\n' % (number, n) for n in range(requests))


def ids_of(store: Store, batch: Batch) -> list[bytes]:
    rows = decode_rows(BatchFiles(store, batch).rows(np.arange(batch.planned, dtype=np.uint32)))
    return sorted(row.custom_id for row in rows)


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store") if request.param == "folder" else f"memory://{tmp_path}")


def test_every_source_is_a_batch_in_order(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "TOGETHER", 4)
    sources = [source(n, 2000 if n == 5 else 3) for n in range(11)]
    monkeypatch.setattr(bulk, "LARGE_BYTES", 20_000)  # The sixth goes by itself.
    made = list(bulk.submit_many(sources, store, SETTINGS, MODELS, Options(name="all", priority="low")))
    assert len({batch.id for batch in made}) == 11
    for number, batch in enumerate(made):
        assert read_batch(store, batch.id) == batch
        assert (batch.name, batch.priority, batch.requests) == ("all", "low", 2000 if number == 5 else 3)
        assert ids_of(store, batch) == sorted(b'"b%d-%d"' % (number, n) for n in range(batch.requests))
    assert store.list("active/0") == sorted(batch.id for batch in made)
    assert store.list("incoming") == []


def test_a_source_that_is_refused_stops_it_there(store: Store) -> None:
    sources = [source(0), source(1), b"{no json}\n", source(3)]
    made: list[Batch] = []
    with pytest.raises(Rejected, match="source 2"):
        made.extend(bulk.submit_many(sources, store, SETTINGS, MODELS, Options()))
    assert store.list("incoming") == []
    assert len(store.list("active/0")) == len(store.list("batches")) == 2


def test_killed_before_any_step(tmp_path: Path) -> None:
    enqueued = []
    for step in range(1000):
        store = LocalStore(tmp_path / f"{step}")
        child = os.fork()
        if child == 0:
            # Never back into the test run, whatever happens.
            try:
                die_at(step)
                list(bulk.submit_many([source(n) for n in range(2)], store, SETTINGS, MODELS, Options()))
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        for batch_id in store.list("active/0"):
            assert batch_id in store.list("batches")
        intake.recover(store)
        there = store.list("active/0")
        assert there == store.list("batches")
        assert store.list("incoming") == []
        for batch_id in there:
            assert len(ids_of(store, read_batch(store, batch_id))) == 3
        enqueued.append(len(there))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert enqueued == sorted(enqueued)
    assert set(enqueued) == {0, 1, 2}


def test_a_disk_that_fills_up_takes_all_of_a_group_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path / "store")
    real = os.open

    def full(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if "/active/" in str(path) and "/.tmp-" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, flags, mode, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(StoreFull):
            list(bulk.submit_many([source(n) for n in range(3)], store, SETTINGS, MODELS, Options()))
    assert store.list("active/0") == store.list("batches") == store.list("incoming") == []
