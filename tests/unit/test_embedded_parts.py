"""The parts of the embedded fleet's daemon, without a fleet."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import UsageError
from common.settings import is_key, load
from common.store import LocalStore
from producers.batch_view import ask
from producers.embedded import demand, fleet, procfs, record
from producers.embedded.child import Child, telling_line
from producers.embedded.keys import ensure_keys
from producers.embedded.layout import Layout
from producers.embedded.lock import FileLock, holder_pid, is_held
from producers.embedded.record import Process, Record, WorkerState
from tests.support import stored
from tests.support.ports import wait_until

SLEEPER = "import sys, time; print('up', flush=True); time.sleep(600)"


def start_sleeper(code: str = SLEEPER, **env: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, **env}, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


@pytest.mark.parametrize(("said", "given"), [("1", 1.0), ("1000", 2.0)])
def test_its_cache_takes_a_quarter_of_the_memory_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, given: float
) -> None:
    """It shares a server with the broker, which counts for that server's machine too."""
    monkeypatch.setattr(fleet, "physical_memory", lambda: 8 << 30)
    where = Layout(tmp_path)
    made = fleet._complete(load(env={"BATCHMILL_CACHE_CAPACITY_GB": said}), where, {})
    assert made.cache.capacity_gb == given
    assert made.cache.url == f"unix://{where.socket}?db=1", "another database than the broker's"
    own = load(env={"BATCHMILL_CACHE_CAPACITY_GB": said, "BATCHMILL_CACHE_URL": "redis://own/0"})
    assert fleet._complete(own, where, {}).cache == own.cache


def test_a_lock_is_free_again_when_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    code = (
        "import sys, time; from producers.embedded.lock import FileLock; from pathlib import Path\n"
        "lock = FileLock(Path(sys.argv[1])); assert lock.try_acquire(); lock.write_pid(); print('up', flush=True)\n"
        "time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        assert is_held(path)
        assert holder_pid(path) == holder.pid
        assert not FileLock(path).try_acquire()
    finally:
        holder.kill()
        holder.wait(60)
    assert not is_held(path)
    assert holder_pid(path) is None


def test_shared_holders_keep_an_exclusive_one_out(tmp_path: Path) -> None:
    one, two, three = (FileLock(tmp_path / "a.lock") for _ in range(3))
    assert one.try_acquire(shared=True)
    assert two.try_acquire(shared=True)
    assert not three.acquire(0.1)
    assert not is_held(tmp_path / "a.lock")
    one.release()
    two.release()
    assert three.try_acquire()
    assert is_held(tmp_path / "a.lock")


def test_a_lock_is_not_inherited_by_children(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "a.lock")
    assert lock.try_acquire()
    child = start_sleeper()
    try:
        lock.release()
        assert not is_held(tmp_path / "a.lock")
    finally:
        child.kill()
        child.wait(60)


def test_keys_are_made_once_and_are_for_their_owner_alone(tmp_path: Path) -> None:
    made = ensure_keys(tmp_path)
    assert all(is_key(k) for k in made.values())
    assert made["dispatch_key"] != made["results_key"]
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o600}
    assert ensure_keys(tmp_path) == made
    (tmp_path / "results_key").write_text("short")
    with pytest.raises(UsageError, match=r"results_key: is not 64 hex digits; remove it"):
        ensure_keys(tmp_path)


def test_a_long_folder_gets_a_short_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("r" * 120)))
    short, long = Layout(Path("/tmp/x")), Layout(tmp_path / ("x" * 120))
    assert short.socket == Path("/tmp/x/redis.sock")
    assert len(str(long.socket)) < 108
    assert long.socket != Layout(tmp_path / ("y" * 120)).socket
    assert long.socket.parent.name == f"batchmill-{os.getuid()}"


def test_folders_are_private_and_others_are_refused(tmp_path: Path) -> None:
    loose = tmp_path / "fleet"
    loose.mkdir(mode=0o755)
    Layout(loose).create()
    assert loose.stat().st_mode & 0o777 == 0o700
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / "linked").symlink_to(target)
    with pytest.raises(UsageError, match="belongs to somebody else"):
        Layout(tmp_path / "linked").create()


def test_the_record_survives_the_way_through_its_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    assert record.read(path) is None
    written = Record(
        state="up",
        pid=7,
        processes=[Process(name="redis", pid=8, started=9)],
        workers=[WorkerState(model="m@1", state="ready", log="/x")],
    )
    record.write(path, written)
    assert record.read(path) == written
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("{")
    assert record.read(path) is None


def wait_exit(child: Child) -> None:
    """Wait for the kernel to say that the child has ended; `tend` has yet to notice."""
    assert child.pid is not None
    fd = os.pidfd_open(child.pid)
    try:
        assert select.select([fd], [], [], 60)[0]
    finally:
        os.close(fd)


def make_child(tmp_path: Path, code: str) -> Child:
    return Child("x", [sys.executable, "-c", code], os.environ, tmp_path / "x.log", tmp_path)


def test_a_child_is_started_again_later_and_later(tmp_path: Path) -> None:
    child = make_child(tmp_path, "print('error: no weights'); raise SystemExit(7)")
    now = 100.0
    delays: list[float] = []
    for _ in range(3):
        assert child.tend(now)
        assert child.alive
        wait_exit(child)
        assert child.tend(now)
        assert not child.alive
        delays.append(child.next_start - now)
        assert not child.tend(child.next_start - 0.01)
        now = child.next_start
    assert delays == [0.5, 1.0, 2.0]
    assert (child.failures, child.exit_status, child.restarts) == (3, 7, 2)
    assert child.last_line == "no weights"
    child.settle()
    assert child.failures == 0


def test_an_exit_after_a_steady_life_counts_as_the_first(tmp_path: Path) -> None:
    child = make_child(tmp_path, "pass")
    child.failures = 5
    assert child.tend(1000.0)
    wait_exit(child)
    assert child.tend(2000.0)
    assert child.failures == 1


def test_retry_now_forgets_failures(tmp_path: Path) -> None:
    child = make_child(tmp_path, "raise SystemExit(1)")
    assert child.tend(100.0)
    wait_exit(child)
    assert child.tend(100.0)
    assert not child.tend(100.0)
    child.retry_now()
    assert child.tend(100.0)
    child.kill()
    wait_exit(child)
    assert child.tend(100.0)


def test_a_large_log_is_set_aside(tmp_path: Path) -> None:
    child = make_child(tmp_path, "print('new')")
    with open(tmp_path / "x.log", "wb") as file:
        file.truncate(17 << 20)
    assert child.tend(0.0)
    wait_exit(child)
    child.tend(0.0)
    assert (tmp_path / "x.log").read_text() == "new\n"
    assert (tmp_path / "x.log.1").stat().st_size == 17 << 20


def test_a_log_that_becomes_large_meanwhile_is_set_aside_too(tmp_path: Path) -> None:
    wait = "while not os.path.exists('go'): time.sleep(0.01)"
    child = make_child(tmp_path, f"import os, time\nprint('x' * (17 << 20), flush=True)\n{wait}\nprint('later')")
    log = tmp_path / "x.log"
    assert child.tend(0.0)
    wait_until(lambda: log.exists() and log.stat().st_size > 17 << 20, 30, "it is large")
    assert not child.tend(100.0)
    assert (log.stat().st_size, (tmp_path / "x.log.1").stat().st_size) == (0, (17 << 20) + 1)
    (tmp_path / "go").touch()
    wait_exit(child)
    assert child.tend(101.0)
    # It went on in the same file, from its beginning.
    assert log.read_text() == "later\n"
    assert child.last_line == "later"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", None),
        ("starting\n\x1b[31merror: no such model\x1b[0m\nbye\n", "no such model"),
        ("Traceback\n  File x\nValueError: bad\n", "ValueError: bad"),
        ("only this\n\n", "only this"),
        ("workers: m@1 is not here\n[warning  ] worker failed, error=x\nbye\n", "m@1 is not here"),
        ("producers: error: no disk\nworkers: redis does not answer; waiting up to 30 s for it\n", "no disk"),
        (
            "workers: error: unexpected KeyError: 'a'; this is a bug\nworkers: set BATCHMILL_DEBUG=1 to see it\n",
            "unexpected KeyError: 'a'; this is a bug",
        ),
        ("error: " + "x" * 1000, "x" * 300),
    ],
)
def test_the_telling_line(tmp_path: Path, text: str, line: str | None) -> None:
    log = tmp_path / "log"
    log.write_text("error: of an earlier life\n" + text)
    assert telling_line(log, len("error: of an earlier life\n")) == line


def test_a_child_dies_with_the_daemon(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from producers.embedded.child import Child\n"
        "t = Path(sys.argv[1])\n"
        "c = Child('x', [sys.executable, '-c', 'import time; time.sleep(600)'], os.environ, t / 'x.log', t)\n"
        "c.tend(0.0); print(c.pid, flush=True); time.sleep(600)"
    )
    daemon = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert daemon.stdout is not None
    fd = os.pidfd_open(int(daemon.stdout.readline()))
    try:
        daemon.send_signal(signal.SIGKILL)
        daemon.wait(60)
        assert select.select([fd], [], [], 60)[0], "the child outlived its daemon"
    finally:
        os.close(fd)


def test_leftovers_are_found_by_mark_and_by_session_and_nothing_else_is(tmp_path: Path) -> None:
    marked = start_sleeper(**{procfs.MARK: str(tmp_path)})
    by_session, stranger = start_sleeper(), start_sleeper(**{procfs.MARK: f"{tmp_path}-other"})
    try:
        seen = procfs.look(by_session.pid)
        assert seen is not None
        recorded = [(by_session.pid, seen.started), (stranger.pid, 1)]
        assert {p.pid for p in procfs.of_fleet(tmp_path, recorded)} == {marked.pid, by_session.pid}
        assert procfs.kill_all(lambda: procfs.of_fleet(tmp_path, recorded)) == 2
        assert marked.wait(60) == by_session.wait(60) == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        for process in (marked, by_session, stranger):
            process.kill()
            process.wait(60)


def test_descendants_are_found_however_deep() -> None:
    code = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import time; print(\"up\", flush=True); time.sleep(600)'])"
    )
    parent = start_sleeper(code)
    try:
        found = procfs.below(os.getpid())
        child = next(p for p in found if p.parent == parent.pid)
        assert parent.pid in {p.pid for p in found}
        procfs.kill_all(lambda: [p for p in procfs.below(os.getpid()) if p.pid == child.pid])
        parent.wait(60)
    finally:
        parent.kill()
        parent.wait(60)


def test_wishes_are_read_with_their_time(tmp_path: Path) -> None:
    before = time.time() - 1
    demand.write_wanted(tmp_path, demand.Wanted(model="m@1"))
    demand.write_wanted(tmp_path, demand.Wanted(model="m@1", linger_s=5))
    (tmp_path / "broken@1.json").write_text("{")
    found = demand.read_wanted(tmp_path)
    assert list(found) == ["m@1"]
    wish, at = found["m@1"]
    assert wish.linger_s == 5
    assert before < at < time.time() + 1
    demand.clear_wanted(tmp_path)
    assert demand.read_wanted(tmp_path) == {}


def test_active_batches_count_by_model_and_ignore_what_cannot_be_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    batch = b'{"id":"%s","model":"%s","created_at":1.0,"shard":0,"input":{"name":"-","bytes":0,"digest":""},'
    batch += b'"requests":1,"planned":1,"invalid":0,"cost":1,"windows":[]}'
    for made, model in ((b"a", b"m@1"), (b"b", b"m@1"), (b"c", b"n@2"), (b"finished", b"o@1")):
        store.put_atomic(f"batches/{made.decode()}/batch.json", batch % (made, model))
    store.put_atomic("batches/d/batch.json", b"{")
    for name in ("a", "b", "c", "d", "e"):
        store.put_atomic(f"active/0/{name}", b"")
    later = b'"not_before":%d,"requests"' % (time.time() + 1000)
    store.put_atomic("batches/c/batch.json", (batch % (b"c", b"n@2")).replace(b'"requests"', later))
    active = demand.ActiveBatches(store, every_s=10)
    assert active.models(0.0) == {"m@1": 2, "n@2": 1}
    assert active.due == {"m@1": 2}
    store.delete("active/0/a")
    assert active.models(9.0) == {"m@1": 2, "n@2": 1}
    assert active.models(10.0) == {"m@1": 1, "n@2": 1}
    store.delete("active/0/c")
    assert active.models() == {"m@1": 1}


def test_a_paused_batch_keeps_no_fleet_unless_something_is_asked_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    paused, due = stored.batch(store), stored.batch(store, expires_at=time.time() + 1000)
    for of in (paused, due):
        store.create_exclusive(f"active/0/{of.id}", b"")
        stored.status(store, of, "in_progress", paused=True)
    active = demand.ActiveBatches(store, every_s=0)
    # Who has a deadline needs a coordinator, and no worker.
    assert active.models(0.0) == {stored.MODEL: 1}
    assert (active.due, active.waiting) == ({}, {stored.MODEL: 2})
    store.delete(f"active/0/{due.id}")
    assert active.models() == {}
    ask(store, paused.id, "resume")
    assert active.models() == {stored.MODEL: 1}
    # Looked at now and then alone.
    stored.status(store, paused, "in_progress", paused=False)
    store.delete(f"control/{paused.id}")
    assert (active.models(1.0), active.due) == ({stored.MODEL: 1}, {stored.MODEL: 1})
    stored.status(store, paused, "in_progress", paused=True)
    assert active.models(2.0) == {stored.MODEL: 1}
    monkeypatch.setattr(demand, "PAUSED_EVERY_S", 0.0)
    assert active.models(3.0) == {}
