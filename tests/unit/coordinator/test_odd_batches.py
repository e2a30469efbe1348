"""Whatever one batch's `batch.json` holds ends neither the coordinator nor troubles the batches beside it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest

from common.errors import Damaged
from common.settings import Scheduler
from common.store import LocalStore
from producers.batch import Batch, Status, folder, read_batch, read_status
from producers.coordinator.book import Book
from producers.coordinator.control import Control
from producers.coordinator.core import Core
from producers.coordinator.finalizer import Finalizer
from producers.coordinator.leadership import Leadership
from producers.coordinator.ledger import Ledger
from producers.coordinator.progress import Progress
from producers.coordinator.status_files import StatusFiles
from producers.coordinator.weights import Weights
from tests.support.coordinators import make_batch

#: `9999-12-31T23:30-14:00`, the last evening of the calendar, and what JSON can hold at most.
MOMENTS = (253402349400.0, 253402300799.0, 253401739200.0, -62135596800.0, 1e308, -1e308, 0.0)
WINDOWS = (None, "22:00-23:00", "22:00-06:00 Asia/Tokyo", "00:00-23:59 America/New_York")


@pytest.fixture
def control(tmp_path: Path) -> Control:
    store = LocalStore(tmp_path / "store")
    leadership = Leadership(store, 0, tmp_path / "wal", 600)
    assert leadership.acquire(threading.Event())
    core = Core(Book(), Ledger(tmp_path / "wal", leadership.epoch), 0, leadership.epoch)
    files = StatusFiles(store)
    return Control(core, store, leadership, Finalizer(core, store, leadership, files), files, 6.0)


def _tick(control: Control) -> None:
    control._looked_at = control._said_at = float("-inf")
    control.tick()


def test_no_hours_end_the_coordinator(control: Control) -> None:
    store, core = control._store, control._core
    odd = [
        make_batch(store, 2, not_before=at, run_between=window, expires_at=end)
        for at in MOMENTS
        for window in WINDOWS
        for end in (None, 1e308, -1e308, 253402349400.0)
    ]
    fine = make_batch(store, 2)
    for _ in range(3):
        _tick(control)
    assert set(core.book.batches) == {b.id for b in odd} | {fine.id}
    weights = Weights(Scheduler())
    now = time.time()
    for progress in core.book.batches.values():
        progress.dispatchable(now)
        assert 0 < weights.of(progress, now)[0] < float("inf")
    assert core.book.batches[fine.id].dispatchable(now)
    control.say_all(last=True)
    assert read_status(store, odd[0]).reason == "scheduled"


def _other(batch: Batch) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(batch, id="batch_01hzzzzzzzzzzzzzzzzzzzzzzz"))


@pytest.mark.parametrize(
    "content",
    [
        lambda b: b"garbage",
        lambda b: b"",
        lambda b: b"\xff\xfe{",
        lambda b: b'{"x":' + b"[" * 100_000,
        lambda b: msgspec.json.encode(msgspec.structs.replace(b, run_between="whenever")),
        lambda b: msgspec.json.encode(msgspec.structs.replace(b, run_between="22:00-06:00 Mars/Olympus")),
        lambda b: msgspec.json.encode(msgspec.structs.replace(b, planned=-1)),
        lambda b: msgspec.json.encode(b).replace(b'"expires_at":null', b'"expires_at":1e999'),
        _other,
    ],
)
def test_a_damaged_batch_fails_with_its_reason(control: Control, content: object) -> None:
    store = control._store
    batch, fine = make_batch(store, 2), make_batch(store, 2)
    store.put_atomic(f"{folder(batch.id)}/batch.json", content(batch))  # type: ignore[operator]
    for _ in range(2):
        _tick(control)
    said = msgspec.json.decode(store.read(f"{folder(batch.id)}/status.json"), type=Status)
    assert said.status == "failed"
    assert "submit" in (said.reason or "")
    assert set(control._core.book.batches) == {fine.id}


@pytest.mark.parametrize("name", ["batch.json", "status.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path)
    batch = make_batch(store, 2)
    store.put_atomic(f"{folder(batch.id)}/{name}", b"garbage")
    with pytest.raises(Damaged, match=f"{batch.id}/{name}: is damaged"):
        read_status(store, read_batch(store, batch.id))


def test_between_two_looks_only_batches_that_something_happened_to_are_asked(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand open batches would cost as much as the work otherwise: there are up to 45 ticks a second."""
    core = control._core
    batches = [make_batch(control._store, 2) for _ in range(5)]
    _tick(control)
    asked: list[str] = []
    monkeypatch.setattr(Progress, "complete", property(lambda progress: asked.append(progress.id)))
    control._looked_at, control._look_again_s = float("inf"), 0.0
    control.tick()
    assert asked == []
    core.ending.add(batches[3].id)
    control.tick()
    assert asked == [batches[3].id]
    _tick(control)
    assert sorted(asked[1:]) == sorted(batch.id for batch in batches)
