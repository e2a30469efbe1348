"""A batch comes to be whole or not at all: killed at every step, on full disks, twice under one key."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import BatchmillError, StoreFull, Unreachable
from common.messages import decode_rows
from common.object_store import ObjectStore
from common.registry import ModelVersion, Registry
from common.settings import Settings
from common.store import LocalStore, Store, open_store
from producers.batch import read_batch
from producers.coordinator.batch_files import BatchFiles
from producers.intake import Options, recover, shard_of, submit_bytes
from producers.intake import spool as spool_module

REGISTRY = Registry({"tiny@1": ModelVersion(source="x")}, {}, "tiny")
LINES = [b'{"custom_id":"%d","body":{"prompt":"x"}}' % n for n in range(50)]
DATA = b"\n".join(LINES)
#: With a bad line in it, so that there are error lines to write too.
BAD = b"\n".join([b"[1]", *LINES])


def submit(store: Store, options: Options = Options(), data: bytes = DATA) -> str:  # noqa: B008  # it is frozen
    return submit_bytes(data, store, Settings(), REGISTRY, options).id


def whole_batches(store: Store) -> list[str]:
    """The batches that are there, each checked to be whole."""
    found = [b for b in store.list("batches") if store.exists(f"batches/{b}/batch.json")]
    for batch_id in found:
        batch = read_batch(store, batch_id)
        files = BatchFiles(store, batch)
        rows = decode_rows(files.rows(np.arange(batch.planned, dtype=np.uint32)))
        assert len(rows) == batch.planned == 50
        assert len(list(files.invalid())) == batch.invalid
    return found


def check(store: Store, key: str | None, data: bytes) -> bool:
    """After a kill: what is there is whole; recovery leaves nothing, or a whole and active batch. True: a batch."""
    for batch_id in store.list("active/0"):
        assert batch_id in whole_batches(store)
    before = whole_batches(store)
    assert len(before) <= 1
    recover(store)
    after = whole_batches(store)
    assert set(before) <= set(after)
    assert store.list("batches") == store.list("active/0") == after
    assert store.list("incoming") == []
    if key is None:
        assert after == before
    else:
        # Whoever repeats the submit gets the batch that came to be, or makes it.
        again = submit(store, Options(idempotency_key=key, skip_invalid=data is BAD), data)
        assert whole_batches(store) == store.list("active/0") == [again]
        assert after in ([], [again])
    return bool(after)


def die_at(step: int) -> None:
    """Make this process end by SIGKILL before its n-th change to the disk."""
    left = [step]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        # Audit hooks see every open, rename, link, mkdir and remove, whoever calls them.
        changes = event in ("os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "fcntl.flock") or (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if changes:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    real_fsync = os.fsync

    def fsync(fd: Any) -> None:
        hook("os.link", ())
        real_fsync(fd)

    os.fsync = fsync


@pytest.mark.parametrize("key", [None, "my-key"])
@pytest.mark.parametrize("skip", [False, True])
def test_killed_before_any_step(tmp_path: Path, key: str | None, skip: bool) -> None:
    options = Options(idempotency_key=key, skip_invalid=skip)
    outcomes = []
    for step in range(1000):
        store = LocalStore(tmp_path / f"{step}")
        child = os.fork()
        if child == 0:
            # Never back into the test run, whatever happens.
            try:
                die_at(step)
                submit(store, options, BAD if skip else DATA)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        outcomes.append(check(store, key, BAD if skip else DATA))
    # The kills did fall before and after the point of no return, and there is one such point.
    assert outcomes == sorted(outcomes)
    assert {False, True} == set(outcomes)
    assert len(outcomes) > 20
    assert len(whole_batches(store)) == 1


class Dead(BaseException):
    """The process is gone."""


class Mortal(ObjectStore):
    """A store whose process ends before its n-th change: from then on nothing is changed any more."""

    def __init__(self, url: str, left: int) -> None:
        super().__init__(url)
        self.left = left

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Dead

    def put_atomic(self, path: str, data: bytes) -> None:
        self._step()
        super().put_atomic(path, data)

    def create_exclusive(self, path: str, data: bytes) -> bool:
        self._step()
        return super().create_exclusive(path, data)

    def delete(self, path: str) -> None:
        self._step()
        super().delete(path)

    @contextlib.contextmanager
    def open_write(self, path: str) -> Iterator[Any]:
        with super().open_write(path) as file:
            yield file
            self._step()


@pytest.mark.parametrize("key", [None, "my-key"])
def test_killed_before_any_step_of_an_object_store(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "DEAD_AFTER_S", -1.0)
    outcomes = []
    for step in range(100):
        url = f"memory://{uuid.uuid4().hex}"
        try:
            submit(Mortal(url, step), Options(idempotency_key=key, skip_invalid=True), BAD)
            break
        except Dead:
            outcomes.append(check(open_store(url), key, BAD))
    assert outcomes == sorted(outcomes)
    assert {False, True} == set(outcomes)
    assert len(whole_batches(open_store(url))) == 1


def test_a_batch_that_is_being_made_is_left_alone(tmp_path: Path) -> None:
    """Recovery runs at every submit; it must not take a slow neighbour's files for a dead one's."""
    store = LocalStore(tmp_path)
    reached, go = threading.Event(), threading.Event()

    class Slow:
        parts = iter([DATA, b""])

        def read(self, size: int) -> bytes:
            part = next(self.parts)
            if not part:
                reached.set()
                assert go.wait(60)
            return part

    from producers.intake import submit_stream

    made: list[str] = []
    thread = threading.Thread(
        target=lambda: made.append(submit_stream(Slow(), store, Settings(), REGISTRY, Options()).id)  # type: ignore[arg-type]
    )
    thread.start()
    assert reached.wait(60)
    assert len(store.list("incoming")) == 2
    recover(store)
    other = submit(store)
    assert len(store.list("incoming")) == 2
    go.set()
    thread.join()
    assert store.list("batches") == store.list("active/0") == sorted([*made, other])
    assert store.list("incoming") == []


def test_an_object_store_waits_before_it_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    with pytest.raises(Dead):
        submit(Mortal(url, 3))
    store = open_store(url)
    recover(store)
    assert store.list("incoming")
    monkeypatch.setattr(spool_module, "DEAD_AFTER_S", -1.0)
    recover(store)
    assert store.list("incoming") == []
    assert not store.exists("batches")


def test_what_the_coordinator_has_had_is_not_made_active_again(tmp_path: Path) -> None:
    """A lock that outlived its batch (a kill between two deletes) must not bring finished work back."""
    store = LocalStore(tmp_path)
    batch_id = submit(store)
    store.put_atomic(f"batches/{batch_id}/status.json", b"{}")
    store.delete(f"active/0/{batch_id}")
    os.close(store.create_locked(f"incoming/{batch_id}.lock"))
    recover(store)
    assert store.list("active/0") == []
    assert store.list("incoming") == []


def test_a_damaged_batch_does_not_stop_recovery(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    batch_id = submit(store)
    store.put_atomic(f"batches/{batch_id}/batch.json", b"{")
    os.close(store.create_locked(f"incoming/{batch_id}.lock"))
    other = submit(store)
    os.close(store.create_locked(f"incoming/{other}.lock"))
    recover(store)
    assert store.list("incoming") == [f"{batch_id}.lock"]


def test_other_files_in_incoming_are_left_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_atomic("incoming/readme", b"")
    store.put_atomic("incoming/batch_x.lock", b"")
    recover(store)
    assert store.list("incoming") == ["batch_x.lock", "readme"]


def test_one_key_makes_one_batch_however_many_ask(tmp_path: Path) -> None:
    barrier = threading.Barrier(5)
    ids: list[str] = []

    def ask() -> None:
        store = LocalStore(tmp_path)
        barrier.wait()
        ids.append(submit(store, Options(idempotency_key="same")))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = LocalStore(tmp_path)
    assert len(ids) == 5
    assert store.list("batches") == store.list("active/0") == [ids[0]] == sorted(set(ids))
    assert store.list("incoming") == []
    assert submit(store, Options(idempotency_key="other")) != ids[0]


def test_the_key_of_a_deleted_batch_is_free_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first = submit(store, Options(idempotency_key="k"))
    store.delete(f"batches/{first}")
    store.delete(f"active/0/{first}")
    second = submit(store, Options(idempotency_key="k"))
    assert store.list("batches") == [second] != [first]


def test_a_shard_is_a_function_of_the_id() -> None:
    assert [shard_of(f"batch_{n}", 3) for n in range(6)] == [shard_of(f"batch_{n}", 3) for n in range(6)]
    assert {shard_of(f"batch_{n}", 3) for n in range(50)} == {0, 1, 2}


def fill_disk(patch: pytest.MonkeyPatch, part: str) -> None:
    """From now on there is no space for files whose path has `part`; data goes to the kernel's /dev/full."""
    real_open, real_fsync, real_link = os.open, os.fsync, os.link

    def opener(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        fd = real_open(path, flags, mode, **more)
        if part not in str(path) or not flags & os.O_WRONLY:
            return fd
        os.close(fd)
        return real_open("/dev/full", os.O_WRONLY)

    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") != "/dev/full":  # which cannot be synced
            real_fsync(fd)

    def link(source: Any, target: Any) -> None:
        # An empty file takes no block, but its name may need one.
        if part in str(target):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        real_link(source, target)

    patch.setattr(os, "open", opener)
    patch.setattr(os, "fsync", fsync)
    patch.setattr(os, "link", link)


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("place", ["/incoming/batch_", "/keys/", "/active/"])
def test_a_full_disk_leaves_no_half_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, key: str | None
) -> None:
    store = LocalStore(tmp_path)
    options = Options(idempotency_key=key)
    with monkeypatch.context() as patch:
        fill_disk(patch, place)
        if place == "/keys/" and key is None:
            submit(store, options)  # nothing is kept there
            return
        with _one_line():
            submit(store, options)
    whole = whole_batches(store)
    if key is None or place != "/active/":
        assert whole == store.list("active/0") == store.list("incoming") == []
    # With space again, recovery has nothing half done to find, and the same submit goes through.
    recover(store)
    assert store.list("batches") == store.list("active/0")
    assert store.list("incoming") == []
    again = submit(store, options)
    assert again in whole_batches(store)
    assert len(whole_batches(store)) == 1


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    with pytest.raises(StoreFull, match=r"^store .*: No space left on device; free some space$") as caught:
        yield
    assert caught.value.exit_code == 3


def test_an_interrupt_at_the_last_moment_takes_the_batch_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says then that nothing was enqueued, so nothing may be."""
    store = LocalStore(tmp_path)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(spool_module, "_activate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            submit(store)
    recover(store)
    assert store.list("batches") == store.list("active/0") == store.list("incoming") == []


def test_a_service_that_fails_at_the_last_moment_takes_the_batch_back() -> None:
    url = f"memory://{uuid.uuid4().hex}"

    class NoActive(ObjectStore):
        def create_exclusive(self, path: str, data: bytes) -> bool:
            raise Unreachable("no")

    with pytest.raises(Unreachable):
        submit(NoActive(url))
    store = open_store(url)
    assert whole_batches(store) == store.list("batches") == store.list("incoming") == []


def test_a_store_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(BatchmillError, match="Input/output error"):
            submit(store)
    recover(store)
    assert store.list("batches") == store.list("incoming") == []
