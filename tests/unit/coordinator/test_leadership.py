"""Who leads: one at a time, at once after a death on the same host, after a silence elsewhere."""

from __future__ import annotations

import itertools
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest

from common.errors import Unreachable
from common.store import LocalStore
from producers.batch import Heartbeat
from producers.coordinator import leadership
from producers.coordinator.core import Ousted
from producers.coordinator.leadership import Leadership
from producers.coordinator.ledger import Ledger
from producers.coordinator.records import Type


class Clock:
    """The monotonic clock of all that wait to lead; it stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.time = time.time

    def monotonic(self) -> float:
        return self.now

    def run_until(self, event: threading.Event) -> bool:
        """Go on by half a second at a time until the event is set."""
        deadline = time.monotonic() + 60
        while not event.wait(0.05) and time.monotonic() < deadline:
            self.now += 0.5
        return event.is_set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(leadership, "time", clock)
    monkeypatch.setattr(leadership, "_POLL_S", 0.02)
    return clock


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def standby(leader: Leadership) -> tuple[threading.Event, threading.Event, threading.Thread]:
    """Try to lead in a thread; (set when it leads, set to give up, the thread)."""
    leads, stop = threading.Event(), threading.Event()

    def body() -> None:
        if leader.acquire(stop):
            leads.set()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return leads, stop, thread


def test_the_first_leads_at_once_and_is_seen(tmp_path: Path, store: LocalStore) -> None:
    first = Leadership(store, 0, tmp_path / "wal", 10)
    assert first.acquire(threading.Event())
    assert first.epoch == 1
    beat = msgspec.json.decode(store.read("coordinator/0.json"), type=Heartbeat)
    assert beat.epoch == 1
    first.check()


def test_what_a_killed_leader_was_writing_is_cleared_away(tmp_path: Path, store: LocalStore) -> None:
    for folder in ("epochs/0", "coordinator"):
        store.put_atomic(f"{folder}/.tmp-killed", b"half")
    assert Leadership(store, 0, tmp_path / "wal", 10).acquire(threading.Event())
    assert list((tmp_path / "store").rglob(".tmp-*")) == []


def test_a_restart_on_the_same_host_does_not_wait(tmp_path: Path, store: LocalStore) -> None:
    first = Leadership(store, 0, tmp_path / "wal", 600)
    assert first.acquire(threading.Event())
    first.close()  # As the death of its process would.
    second = Leadership(store, 0, tmp_path / "wal", 600)
    assert second.acquire(threading.Event())
    assert second.epoch == 2
    with pytest.raises(Ousted, match="epoch 2 leads now"):
        first.check()


def test_a_standby_waits_while_the_leader_lives_and_leads_when_it_is_gone(tmp_path: Path, store: LocalStore) -> None:
    first = Leadership(store, 0, tmp_path / "wal", 600)
    assert first.acquire(threading.Event())
    leads, _, _ = standby(Leadership(store, 0, tmp_path / "wal", 600))
    assert not leads.wait(0.6)
    first.resign()
    assert leads.wait(60)


def test_a_leader_that_hangs_is_replaced_and_told(tmp_path: Path, store: LocalStore, clock: Clock) -> None:
    first = Leadership(store, 0, tmp_path / "wal", 8)
    assert first.acquire(threading.Event())
    leads, _, _ = standby(Leadership(store, 0, tmp_path / "wal", 8))
    for _ in range(4):
        clock.now += 7
        assert not leads.wait(0.2)
        first.beat()  # It lives, on whatever clock.
    assert clock.run_until(leads)
    with pytest.raises(Ousted):
        first.check()
    first.resign()
    beat = msgspec.json.decode(store.read("coordinator/0.json"), type=Heartbeat)
    assert beat.epoch == 2


def test_another_hosts_leader_is_respected_although_its_lock_is_elsewhere(
    tmp_path: Path, store: LocalStore, clock: Clock
) -> None:
    first = Leadership(store, 0, tmp_path / "wal-here", 8)
    assert first.acquire(threading.Event())
    leads, stop, thread = standby(Leadership(store, 0, tmp_path / "wal-there", 8, host="elsewhere"))
    for _ in range(4):
        clock.now += 7
        assert not leads.wait(0.2)
        first.beat()
    assert clock.run_until(leads)
    assert not stop.is_set()
    thread.join(60)


def test_two_standbys_one_leader(tmp_path: Path, store: LocalStore, clock: Clock) -> None:
    first = Leadership(store, 0, tmp_path / "wal", 5)
    assert first.acquire(threading.Event())
    waiting = [standby(Leadership(store, 0, tmp_path / f"wal{n}", 5, host=f"h{n}")) for n in range(3)]

    def leaders() -> int:
        return sum(leads.is_set() for leads, _, _ in waiting)

    deadline = time.monotonic() + 60
    while not leaders() and time.monotonic() < deadline:
        time.sleep(0.05)
        clock.now += 0.5
    time.sleep(0.2)
    assert leaders() == 1
    for _, stop, thread in waiting:
        stop.set()
        thread.join(60)
    assert len(store.list("epochs/0")) == 2


def test_waiting_ends_when_it_is_told_to(tmp_path: Path, store: LocalStore) -> None:
    first = Leadership(store, 0, tmp_path / "wal", 600)
    assert first.acquire(threading.Event())
    leads, stop, thread = standby(Leadership(store, 0, tmp_path / "wal", 600))
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not leads.is_set()


def test_a_store_that_is_away_ends_no_standby_and_is_no_silence_of_the_leader(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    away, looks = threading.Event(), itertools.count()
    looked = threading.Event()
    real = LocalStore.list

    def listing(self: LocalStore, path: str) -> list[str]:
        if away.is_set() and path.startswith("epochs") and threading.current_thread() is not threading.main_thread():
            raise Unreachable("store: does not answer")
        if threading.current_thread() is not threading.main_thread() and next(looks) > 4:
            looked.set()
        return real(self, path)

    monkeypatch.setattr(LocalStore, "list", listing)
    monkeypatch.setattr(leadership, "_AWAY_S", 0.05)
    first = Leadership(store, 0, tmp_path / "wal", 8)
    assert first.acquire(threading.Event())
    leads, _, thread = standby(Leadership(store, 0, tmp_path / "wal", 8))
    assert looked.wait(60)
    away.set()
    assert not leads.wait(0.3)
    clock.now += 20  # The leader could not be heard for longer than a takeover takes.
    assert not leads.wait(0.3)
    away.clear()
    assert not leads.wait(0.3)
    assert thread.is_alive()
    assert clock.run_until(leads)


def test_old_epochs_are_forgotten(tmp_path: Path, store: LocalStore) -> None:
    for _ in range(12):
        one = Leadership(store, 0, tmp_path / "wal", 10)
        assert one.acquire(threading.Event())
        one.close()
    assert sorted(int(n) for n in store.list("epochs/0")) == list(range(5, 13))


def test_a_damaged_heartbeat_is_as_good_as_none(tmp_path: Path, store: LocalStore) -> None:
    store.put_atomic("coordinator/0.json", b"{")
    assert Leadership(store, 0, tmp_path / "wal", 10).acquire(threading.Event())


def test_a_leader_of_this_host_with_another_ledger_folder_is_respected_while_it_lives(
    tmp_path: Path, store: LocalStore
) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        first = Leadership(store, 0, tmp_path / "wal-a", 600)
        assert first.acquire(threading.Event())
        beat = msgspec.json.decode(store.read("coordinator/0.json"), type=Heartbeat)
        store.put_atomic("coordinator/0.json", msgspec.json.encode(msgspec.structs.replace(beat, pid=sleeper.pid)))
        leads, _, thread = standby(Leadership(store, 0, tmp_path / "wal-b", 600))
        assert not leads.wait(0.6)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert leads.wait(60)
    thread.join(60)


def test_a_store_made_anew_does_not_reuse_the_names_of_old_segments(tmp_path: Path, store: LocalStore) -> None:
    folder = tmp_path / "wal"
    old = Ledger(folder, 7)
    old.append(Type.RESULTS, b"old", ["batch"])
    old.close()
    anew = Leadership(store, 0, folder, 10)
    assert anew.acquire(threading.Event())
    assert anew.epoch == 8
    Ledger(folder, anew.epoch).append(Type.RESULTS, b"new", ["batch"])
