"""A coordinator takes up a new batch on the kernel's word, without glancing at the disk."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from common.store import LocalStore
from producers.coordinator.book import Book
from producers.coordinator.control import Control
from producers.coordinator.core import Core
from producers.coordinator.finalizer import Finalizer
from producers.coordinator.leadership import Leadership
from producers.coordinator.ledger import Ledger
from producers.coordinator.status_files import StatusFiles
from tests.support.coordinators import make_batch
from tests.support.ports import wait_until


def test_a_new_batch_needs_no_glance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path / "store")
    leadership = Leadership(store, 0, tmp_path / "wal", 600)
    assert leadership.acquire(threading.Event())
    core = Core(Book(), Ledger(tmp_path / "wal", leadership.epoch), 0, leadership.epoch)
    files = StatusFiles(store)
    control = Control(core, store, leadership, Finalizer(core, store, leadership, files), files, 6.0)
    # No look for the next hour but the first one, and glances that see nothing.
    monkeypatch.setattr(control, "_period", 3600.0)
    monkeypatch.setattr(control.news._changes, "noticed", lambda: False)
    first = make_batch(store, 2)
    threads = [core.spawn("control", control.run), core.spawn("watch", control.news.watch)]
    try:
        wait_until(lambda: first.id in core.book.batches, 60, "the first look")
        later: list[str] = []

        def taken_up() -> bool:
            # One more each time: nobody is told of what came before the watch began.
            later.append(make_batch(store, 2).id)
            return not core.book.batches.keys().isdisjoint(later)

        wait_until(taken_up, 60, "a batch that came later is taken up", every=0.2)
    finally:
        core.shut()
        for thread in threads:
            thread.join(60)
    assert core.fatal is None
