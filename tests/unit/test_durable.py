"""What a power cut would take: a file has its name only once its bytes are on the disk, and then its name is there too.

A process that is killed leaves what it wrote to the page cache, so no kill shows this: the order of the calls does.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common import local_group
from common.new_file import replacing
from common.store import LocalStore, sync_folder
from producers.coordinator import manifest, segments
from producers.coordinator.ledger import Ledger
from producers.coordinator.log_copies import fetch
from producers.coordinator.records import Type


class Disk:
    """Watches the calls that give names and those that make durable, from all threads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        #: (device, inode) → size at the last sync.
        self._sizes: dict[tuple[int, int], int] = {}
        #: Files that got a name before their bytes were durable.
        self.early: list[str] = []
        #: Folders with names that are not durable.
        self.open_folders: set[tuple[int, int]] = set()
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._synced(getattr(os, name)))
        for name in ("replace", "rename", "link"):
            patch.setattr(os, name, self._named(getattr(os, name)))
        syncfs = local_group._syncfs
        assert syncfs is not None
        patch.setattr(local_group, "_syncfs", lambda fd: syncfs(fd) or self._all(Path(f"/proc/self/fd/{fd}")))

    def whole(self, path: Path) -> bool:
        """All bytes of the file are durable."""
        facts = path.stat()
        return self._sizes.get((facts.st_dev, facts.st_ino)) == facts.st_size

    def _synced(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(fd: int) -> None:
            facts = os.fstat(fd)
            real(fd)
            with self._lock:
                self._note(facts)

        return call

    def _note(self, facts: os.stat_result) -> None:
        key = (facts.st_dev, facts.st_ino)
        if stat.S_ISDIR(facts.st_mode):
            self.open_folders.discard(key)
        else:
            self._sizes[key] = facts.st_size

    def _all(self, root: Path) -> int:
        with self._lock:
            for path in root.resolve().rglob("*"):
                self._note(path.stat())
        return 0

    def _named(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(source: Any, target: Any, **named: Any) -> None:
            path = Path(source)
            with self._lock:
                if path.is_file() and not self.whole(path):
                    self.early.append(str(target))
            real(source, target, **named)
            folder = Path(target).parent.stat()
            with self._lock:
                self.open_folders.add((folder.st_dev, folder.st_ino))

        return call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def _put_atomic(store: LocalStore) -> None:
    store.put_atomic("batches/b/status.json", b"{}")


def _create_exclusive(store: LocalStore) -> None:
    assert store.create_exclusive("active/0/b", b"x")


def _open_write(store: LocalStore) -> None:
    with store.open_write("incoming/b/rows") as file:
        file.write(b"x" * 1_000_000)


def _group(files: int) -> Callable[[LocalStore], None]:
    def write(store: LocalStore) -> None:
        with store.group(lambda: None) as group:
            for number in range(files):
                group.put(f"batches/b{number}/status.json", b"{}")

    return write


def _move(store: LocalStore) -> None:
    store.put_atomic("incoming/b/rows", b"x")
    store.move("incoming/b", "batches/b")


def _manifest(store: LocalStore) -> None:
    manifest.write(store.root, 3, ["2-0"])


def _seal(store: LocalStore) -> None:
    segments.write_seal(store.root / "2-0", segments.seal_of(0, 3), sync_folder)


def _fetch(store: LocalStore) -> None:
    store.put_atomic(f"wal/0/{segments.Name(1, 0)}", b"x")
    (store.root / "log").mkdir()
    assert fetch(store, 0, store.root / "log") == 1


@pytest.mark.parametrize(
    "write",
    [_put_atomic, _create_exclusive, _open_write, _group(3), _group(20), _group(70), _move, _manifest, _seal, _fetch],
)
def test_a_name_stands_for_durable_bytes(write: Callable[[LocalStore], None], disk: Disk, tmp_path: Path) -> None:
    write(LocalStore(tmp_path))
    assert disk.early == []
    assert disk.open_folders == set()


def test_outputs_are_whole_before_they_have_their_name(disk: Disk, tmp_path: Path) -> None:
    with replacing(tmp_path / "output.jsonl") as file:
        file.write(b"{}\n")
    assert disk.early == []
    assert disk.whole(tmp_path / "output.jsonl")


def test_a_synced_log_is_on_the_disk_and_a_sealed_one_too(disk: Disk, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 1)
    ledger.append(Type.RESULTS, b"x" * 100)
    assert ledger.sync() == ledger.written
    [segment] = tmp_path.iterdir()
    assert disk.whole(segment)
    # Its writer is killed before it syncs; whoever reads it takes it for what is there, and acknowledges by it.
    ledger.append(Type.RESULTS, b"y" * 100)
    assert not disk.whole(segment)
    later = Ledger(tmp_path, 2)
    assert len(list(later.recover())) == 2
    assert disk.whole(segment)
    later.close()
    ledger.close()
