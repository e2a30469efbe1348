"""Batches that ended long ago leave the store, with all that was theirs, and no others."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from common.ids import new_ulid, ulid_text
from common.registry import ModelVersion, Registry
from common.settings import Settings
from common.store import LocalStore
from producers import prune
from producers.batch import folder
from producers.cli.handler import run
from producers.intake import Options, submit_bytes
from producers.intake.spool import find_by_key
from tests.support import stored

DAY = 86400.0
NOW = time.time()


def batch_id_of(made_at: float) -> str:
    """The id of a batch that was made then (Unix seconds)."""
    return f"batch_{ulid_text(int(made_at * 1000) << 80 | new_ulid() % 2**80)}"


def batch_of(store: LocalStore, monkeypatch: pytest.MonkeyPatch, days: float, status: str | None, **fields: Any) -> str:
    """A batch that was made, and ended, so many days ago."""
    made_at = NOW - days * DAY
    made = batch_id_of(made_at)
    monkeypatch.setattr(stored, "new_batch_id", lambda: made)
    of = stored.batch(store, created_at=made_at, **fields)
    if status is not None:
        stored.status(store, of, status, finished_at=made_at if status == "completed" else None)
    return made


def test_what_ended_long_ago_goes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATCHMILL_HOME", str(tmp_path))
    monkeypatch.setenv("BATCHMILL_CONFIG", "")
    monkeypatch.chdir(tmp_path)
    store = LocalStore(tmp_path / "store")
    long_gone = batch_of(store, monkeypatch, 50, "completed", name="a\x1bname")
    retried = batch_of(store, monkeypatch, 45, "completed")
    retried_again = batch_of(store, monkeypatch, 40, "completed", retry_of=retried)
    running = batch_of(store, monkeypatch, 40, "in_progress")
    ending = batch_of(store, monkeypatch, 39, "completed")
    store.create_exclusive(f"active/0/{ending}", b"")
    queued = batch_of(store, monkeypatch, 38, None)
    young = batch_of(store, monkeypatch, 3, "completed", retry_of=retried_again)
    half = batch_id_of(NOW - 60 * DAY)
    store.put_atomic(f"{folder(half)}/output.jsonl", b"{}")
    being_made = batch_id_of(NOW)
    store.put_atomic(f"{folder(being_made)}/rows", b"")
    everything = store.list("batches")
    assert run(["prune", "--older-than", "30d", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"batches": [half, long_gone], "removed": False}
    assert store.list("batches") == everything
    assert run(["prune", "--older-than", "30d"]) == 0
    shown = capsys.readouterr()
    assert "2 batches removed" in shown.err
    assert f"{long_gone}  ended 50 d ago  a\ufffdname" in shown.out
    assert store.list("batches") == sorted({*everything} - {half, long_gone})
    assert {running, ending, queued, young, retried, retried_again, being_made} <= set(store.list("batches"))
    assert run(["prune", "--older-than", "2d"]) == 0
    assert set(store.list("batches")) == {running, ending, queued, being_made}
    assert run(["prune", "--older-than", "30d"]) == 0
    assert "no batch ended more than 30d ago" in capsys.readouterr().err
    assert run(["prune", "--older-than", "soon"]) == 2


def test_a_key_goes_with_its_batch(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    registry = Registry({"m@1": ModelVersion(source="x")}, {}, "m")
    line = b'{"custom_id":"a","body":{"prompt":"x"}}'
    batch = submit_bytes(line, store, Settings(), registry, Options(idempotency_key="k"))
    stored.status(store, batch, "completed", finished_at=time.time())
    store.delete(f"active/0/{batch.id}")
    later = time.time() + DAY
    assert [one.id for one in prune.remove(store, prune.old(store, later))] == [batch.id]
    assert store.list("keys") == store.list("batches") == []
    assert find_by_key(store, "k") is None
