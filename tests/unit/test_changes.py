"""A change in a local store ends a wait; elsewhere a wait is a wait."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from common.changes import Changes
from common.inotify import NewNames
from common.store import LocalStore, open_store
from tests.support.ports import wait_until


def test_a_wait_on_a_local_disk_ends_with_a_change(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_atomic("folder/first", b"1")
    changes = Changes(store, "folder", "not-there")
    assert not changes.wait(0.05)
    store.put_atomic("folder/second", b"2")
    assert changes.wait(60)
    assert not changes.wait(0.05)
    timer = threading.Timer(0.05, store.put_atomic, ("not-there", b"3"))
    timer.start()
    assert changes.wait(60)
    timer.join()


def test_an_event_ends_a_wait_and_what_changed_meanwhile_is_not_lost(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    changes = Changes(store, "file")
    event = threading.Event()
    event.set()

    def enough(_seconds: float) -> bool:
        store.put_atomic("file", b"x")
        return event.is_set()

    assert not changes.wait(60, enough)
    assert changes.wait(60)


def test_another_store_is_never_glanced_at() -> None:
    waits: list[float] = []
    started = time.monotonic()
    assert not Changes(open_store("memory://changes"), "file").wait(50.0, waits.append)
    assert waits == [50.0]
    assert time.monotonic() - started < 50.0


def test_new_names_in_a_folder_are_told_of(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(OSError, match="inotify_add_watch"):
        NewNames(str(folder))
    folder.mkdir()
    store = LocalStore(tmp_path)
    with NewNames(str(folder)) as names:
        assert not names.wait(0)
        (folder / ".tmp-being-written").touch()
        assert not names.wait(0)
        timer = threading.Timer(0.05, store.create_exclusive, ("folder/new", b""))
        timer.start()
        wait_until(lambda: names.wait(1), 60, "the new name")
        timer.join()
        assert not names.wait(0)
        # More than one read, and more than the kernel remembers.
        for n in range(20_000):
            os.symlink("nowhere", folder / f"{n:0200}")
        assert names.wait(60)
        assert not names.wait(0)
        shutil.rmtree(folder)
        with pytest.raises(OSError, match="the folder is gone"):
            names.wait(60)
