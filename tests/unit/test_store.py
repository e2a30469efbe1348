"""Every store keeps the same promises: a folder, fsspec's memory, and S3 (moto's server on loopback)."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import StoreFull, Unreachable, UsageError
from common.object_store import ObjectStore
from common.store import LocalStore, Store, open_store
from tests.support.s3 import new_bucket, s3_env, s3_server


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "folder":
        return open_store(f"file://{tmp_path}/store")
    if request.param == "memory":
        return open_store(f"memory://{uuid.uuid4().hex}/prefix")
    return s3_store(request.getfixturevalue("s3_endpoint"), monkeypatch)


def s3_store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in s3_env(endpoint).items():
        monkeypatch.setenv(name, value)
    return open_store(f"s3://{new_bucket()}/some/prefix")


def test_what_is_put_can_be_read(store: Store) -> None:
    store.put_atomic("a/b/file", b"0123456789")
    assert store.read("a/b/file") == b"0123456789"
    assert store.size("a/b/file") == 10
    assert store.exists("a/b/file")
    assert store.exists("a/b")
    store.put_atomic("a/b/file", b"new")
    assert store.read("a/b/file") == b"new"
    with store.open_read("a/b/file") as file:
        assert file.read() == b"new"
    store.put_atomic("empty", b"")
    assert store.read("empty") == b""
    assert store.size("empty") == 0


def test_ranges_end_where_the_file_ends(store: Store) -> None:
    store.put_atomic("f", b"0123456789")
    assert store.read_range("f", 2, 3) == b"234"
    assert store.read_range("f", 8, 100) == b"89"
    assert store.read_range("f", 10, 5) == b""
    assert store.read_range("f", 100, 5) == b""
    assert store.read_range("f", 3, 0) == b""


def test_what_is_missing_is_missing(store: Store) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: store.read("no/where"),
        lambda: store.read_range("no/where", 0, 5),
        lambda: store.size("no/where"),
        lambda: store.open_read("no/where"),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError):
            call()
    assert not store.exists("no/where")
    assert store.list("no") == []
    store.delete("no/where")
    store.delete("no")


def test_listings_are_sorted_and_one_level_deep(store: Store) -> None:
    assert store.list("") == []
    for path in ("d/z", "d/a", "d/sub/x", "dd/y"):
        store.put_atomic(path, b"x")
    assert store.list("d") == ["a", "sub", "z"]
    assert store.list("d/sub") == ["x"]
    assert store.list("") == ["d", "dd"]
    store.delete("d/a")
    assert store.list("d") == ["sub", "z"]
    store.delete("d")
    assert store.list("d") == []
    assert not store.exists("d/sub/x")
    assert store.read("dd/y") == b"x"


def test_only_the_first_creates(store: Store) -> None:
    assert store.create_exclusive("e/1", b"first")
    assert not store.create_exclusive("e/1", b"second")
    assert store.read("e/1") == b"first"
    assert store.list("e") == ["1"]


# fsspec's memory has no atomic create, and no second process.
@pytest.mark.parametrize("store", ["folder", "s3"], indirect=True)
def test_of_many_at_once_one_creates(store: Store) -> None:
    barrier = threading.Barrier(6)
    won: list[int] = []

    def create(n: int) -> None:
        barrier.wait()
        if store.create_exclusive("race", b"%d" % n):
            won.append(n)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("race") == b"%d" % won[0]


def test_a_file_appears_when_its_block_ends(store: Store) -> None:
    with store.open_write("w/file") as file:
        file.write(b"part one, ")
        file.write(b"x" * (6 << 20))
        assert not store.exists("w/file")
        assert store.list("w") == []
    assert store.size("w/file") == 10 + (6 << 20)
    with store.open_write("w/none"):
        pass
    assert store.read("w/none") == b""


def test_a_file_whose_block_fails_never_appears(store: Store) -> None:
    store.put_atomic("w/old", b"old")
    for path in ("w/new", "w/old"):
        with pytest.raises(KeyError), store.open_write(path) as file:
            raise KeyError(file.write(b"x" * (20 << 20)))
    assert store.list("w") == ["old"]
    assert store.read("w/old") == b"old"


@pytest.mark.parametrize("count", [12, 40, 100])
def test_files_of_a_group_appear_together(store: Store, count: int) -> None:
    store.put_atomic("g/1/old", b"old")
    seen: list[list[str]] = []
    with store.group(lambda: seen.append(store.list("g/1"))) as group:
        for n in range(count):
            group.put(f"g/{n}/file", b"%d" % n)
        group.put("g/1/old", b"new")
        with group.open_write("g/1/large") as file:
            file.write(b"x" * (6 << 20))
        with pytest.raises(KeyError), group.open_write("g/1/failed") as file:
            raise KeyError(file.write(b"x"))
        group.discard("g/2")
        assert store.list("g/3") == []
    assert seen == [["old"]]
    assert store.list("g/1") == ["file", "large", "old"]
    assert store.read("g/1/old") == b"new"
    assert store.size("g/1/large") == 6 << 20
    assert store.list("g/2") == []
    assert [store.read(f"g/{n}/file") for n in (0, 3, 11)] == [b"0", b"3", b"11"]


@pytest.mark.parametrize("fenced_off", [True, False])
def test_a_group_that_fails_or_is_fenced_off_leaves_nothing(store: Store, fenced_off: bool) -> None:
    def fence() -> None:
        if fenced_off:
            raise KeyError

    def write() -> None:
        with store.group(fence) as group:
            group.put("g/old", b"new")
            group.put("g/new", b"new")
            if not fenced_off:
                raise KeyError

    store.put_atomic("g/old", b"old")
    with pytest.raises(KeyError):
        write()
    assert store.list("g") == ["old"]
    assert store.read("g/old") == b"old"


def test_what_killed_writers_left_is_swept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_atomic("d/file", b"x")
    mine = store.temporary(tmp_path / "d" / "x")
    dead = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{_dead_pid()}-"))
    elsewhere = mine.with_name(".tmp-00000000-1-x")
    for path in (mine, dead, elsewhere):
        path.touch()
    store.sweep("d", dead_only=True)
    assert sorted(tmp_path.glob("d/.*")) == sorted([mine, elsewhere])
    store.sweep("d")
    store.sweep("nowhere")
    assert [p.name for p in tmp_path.glob("d/*")] == ["file"]


def _dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_paths_stay_inside(store: Store) -> None:
    for path in ("../x", "a/../../x", "/etc/passwd"):
        with pytest.raises(UsageError, match="leaves the store"):
            store.read(path)
        with pytest.raises(UsageError, match="leaves the store"):
            store.put_atomic(path, b"")


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = LocalStore(tmp_path / "new" / "store")
        store.put_atomic("a/b/c", b"x")
        store.create_exclusive("a/d/e", b"x")
        os.close(store.create_locked("a/f/g"))
    finally:
        os.umask(old)
    for path in (tmp_path / "new").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_moves_happen_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_atomic("in/x/file", b"1")
    store.move("in/x", "out/x")
    assert store.read("out/x/file") == b"1"
    store.move("in/x", "out/x")  # gone: done by another
    store.put_atomic("in/x/file", b"2")
    store.move("in/x", "out/x")  # there already: the first stays
    assert store.read("out/x/file") == b"1"


def test_locks_end_with_their_descriptor(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    held = store.create_locked("l")
    assert store.try_lock("l") is None
    assert store.try_lock("none") is None
    os.close(held)
    again = store.try_lock("l")
    assert again is not None
    os.close(again)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put_atomic("d/old", b"old")
    real_open = os.open

    def open_full(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if ".tmp-" not in str(path):
            return real_open(path, flags, mode, **more)
        os.close(real_open(path, flags, mode, **more))
        return real_open("/dev/full", os.O_WRONLY)

    monkeypatch.setattr(os, "open", open_full)
    for write in (
        lambda: store.put_atomic("d/new", b"x"),
        lambda: store.put_atomic("d/old", b"x" * (1 << 20)),
        lambda: store.create_exclusive("d/new", b"x"),
    ):
        with pytest.raises(StoreFull, match=r"store .*: d/(new|old): cannot be written: No space left on device"):
            write()
    monkeypatch.undo()
    assert os.listdir(tmp_path / "d") == ["old"]
    assert store.read("d/old") == b"old"
    assert StoreFull.exit_code == 3


def test_a_disk_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put_atomic("f", b"x")

    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(Unreachable, match="g: cannot be written: Input/output error"):
            store.put_atomic("g", b"x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        with pytest.raises(Unreachable, match="f: cannot be read: Input/output error"):
            store.read_range("f", 0, 1)
    assert store.list("") == ["f"]


def test_errors_of_the_caller_stay_the_callers(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(BrokenPipeError), store.open_write("f"):
        raise BrokenPipeError
    assert store.list("") == []


def test_a_store_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "else")
    for place in ("file", "file/below", "link", "link/below", "/proc/store", "/proc/store/below"):
        with pytest.raises(Unreachable, match=r"is not a folder|Not a directory|No such file"):
            LocalStore(tmp_path / place)


def test_a_bucket_that_is_not_there(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_store(s3_endpoint, monkeypatch)
    store = open_store("s3://no-such-bucket/x")
    assert store.list("active") == []
    with pytest.raises(FileNotFoundError):
        store.read("x")
    for write in (lambda: store.put_atomic("x", b""), lambda: store.create_exclusive("x", b"")):
        with pytest.raises(Unreachable, match="x: cannot be written: there is no such bucket"):
            write()


def test_a_service_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(Unreachable, match="store s3://nowhere: cannot be opened"):
        ObjectStore("s3://nowhere")
    with pytest.raises(UsageError, match="nosuch://x: cannot be opened"):
        ObjectStore("nosuch://x")


@pytest.mark.parametrize("links", [True, False])
def test_the_empty_files_of_a_group_are_one_file(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a file system that has no links they are several, and every one is there all the same."""
    store = LocalStore(tmp_path)
    if not links:

        def link(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, "no links here")

        monkeypatch.setattr(os, "link", link)
    for _ in range(2):  # the second time they take the place of those of the first
        with store.group(lambda: None) as group:
            for n in range(5):
                group.put(f"g/{n}/empty", b"")
                with group.open_write(f"g/{n}/written") as file:
                    file.write(b"")
                    file.write(b"%d" % n)
                    file.write(b"x")
                with group.open_write(f"g/{n}/errors") as file:
                    pass
                if n == 0:
                    group.discard("g/0")
    assert store.list("g/0") == []
    paths = [tmp_path / "g" / str(n) / name for n in range(1, 5) for name in ("empty", "errors")]
    assert all(path.stat().st_size == 0 and stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
    assert len({path.stat().st_ino for path in paths}) == (1 if links else len(paths))
    for n in range(1, 5):
        assert store.list(f"g/{n}") == ["empty", "errors", "written"]
        assert store.read(f"g/{n}/written") == b"%dx" % n
        assert not [name for name in os.listdir(tmp_path / "g" / str(n)) if name.startswith(".tmp")]


def test_a_file_is_created_though_its_folder_is_put_away_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    link, times = os.link, iter((True, True, False))

    def taken_away(source: Path, target: Path) -> None:
        if next(times):
            store.delete("control/batch")
        link(source, target)

    monkeypatch.setattr(os, "link", taken_away)
    assert store.create_exclusive("control/batch/01.json", b"cancel")
    assert store.list("control/batch") == ["01.json"]
