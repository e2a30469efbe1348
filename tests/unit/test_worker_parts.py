"""Leases, the outbox, credit and the renewal of visibility, without brokers."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from common import redis_clock
from common.live import WorkerFacts
from common.messages import QUEUE_DEAD
from common.settings import Settings
from tests.support.ports import wait_until
from workers import outbox as outbox_module
from workers.credit import MOST, Credit, grown, shrunk
from workers.gate import Gate
from workers.lease import Leases
from workers.outbox import Abandoned, Outbox
from workers.visibility import RenewVisibility, renew


class FakeLive:
    """Notes what it is told; `down` makes it unreachable."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.down = False
        self.cancelled_batches: set[str] = set()

    def _note(self, name: str, value: Any) -> None:
        if self.down:
            raise redis.ConnectionError("no")
        self.calls.append((name, value))

    def renew_leases(self, chunk_ids: Any, node: str, lease_s: float, life: str) -> None:
        self._note("renew", sorted(chunk_ids))

    def cancelled(self, batches: list[str]) -> set[str]:
        self._note("cancelled?", batches)
        return self.cancelled_batches & set(batches)

    def announce(self, facts: WorkerFacts) -> None:
        self._note("announce", facts.state)

    def drop_leases(self, chunk_ids: list[str]) -> None:
        for chunk_id in chunk_ids:
            self._note("drop", chunk_id)

    def withdraw(self, node: str) -> None:
        self._note("withdraw", node)

    def told(self, name: str) -> list[Any]:
        return [value for found, value in list(self.calls) if found == name]


def facts(state: str) -> WorkerFacts:
    return WorkerFacts(
        node="n",
        model="m@1",
        host="h",
        pid=1,
        device="cpu",
        engine="echo",
        state=state,
        max_num_seqs=1,
        chunks_in_flight=3,
    )


class FakeRun:
    """A chunk in work."""

    def __init__(self, *batches: str) -> None:
        self.batches = set(batches)
        self.forgotten: list[set[str]] = []
        self.work = SimpleNamespace(forget=self.forgotten.append)


def leases(
    live: FakeLive, runs: dict[str, Any], state: Callable[[], str] = lambda: "ready", every: float = 0.02
) -> Leases:
    return Leases(live, "n", 15, runs, lambda: facts(state()), lambda: None, every)  # type: ignore[arg-type]


def test_leases_are_renewed_given_back_and_the_worker_withdrawn() -> None:
    live, runs = FakeLive(), {"c1": FakeRun("b1"), "c2": FakeRun("b2")}
    thread = leases(live, runs)
    thread.start()
    wait_until(lambda: len(live.told("renew")) >= 3, 5, "renewals")
    assert live.told("renew")[0] == ["c1", "c2"]
    del runs["c1"]
    thread.drop("c1")
    wait_until(lambda: live.told("drop") == ["c1"], 5, "the lease is given back")
    thread.drop("c2")  # taken up again meanwhile
    wait_until(lambda: live.told("renew")[-1] == ["c2"], 5, "the other is renewed")
    thread.close()
    assert live.told("drop") == ["c1"]
    assert live.told("withdraw") == ["n"]
    assert not thread.is_alive()


def test_a_change_of_state_is_announced_at_once() -> None:
    live, now = FakeLive(), ["loading"]
    thread = leases(live, {}, lambda: now[0], every=30)
    thread.start()
    wait_until(lambda: live.told("announce") == ["loading"], 5, "first announcement")
    now[0] = "ready"
    thread.wake()
    wait_until(lambda: live.told("announce") == ["loading", "ready"], 5, "second announcement")
    thread.close()


def test_who_must_be_known_at_once_announces_in_its_own_thread() -> None:
    live = FakeLive()
    thread = leases(live, {}, every=30)
    thread.announce()
    assert live.told("announce") == ["ready"]
    live.down = True
    thread.announce()


def test_runs_hear_of_cancelled_batches() -> None:
    live, run = FakeLive(), FakeRun("b1", "b2")
    live.cancelled_batches = {"b2", "b3"}
    thread = leases(live, {"c": run})
    thread.start()
    wait_until(lambda: run.forgotten != [], 5, "the run is told")
    assert run.forgotten[0] == {"b2"}
    thread.close()


def test_an_outage_of_redis_costs_nothing() -> None:
    live = FakeLive()
    live.down = True
    ticks = threading.Event()
    thread = Leases(live, "n", 15, {"c": FakeRun("b")}, lambda: facts("ready"), ticks.set, 0.02)  # type: ignore[arg-type,dict-item]
    thread.start()
    assert ticks.wait(60)
    ticks.clear()
    assert ticks.wait(60), "the thread goes on"
    live.down = False
    wait_until(lambda: live.told("renew") != [], 5, "renewals after the outage")
    live.down = True
    thread.close()
    assert not thread.is_alive()


class FakePublisher:
    """Fails `failures` times, then takes everything."""

    made: list[FakePublisher] = []  # noqa: RUF012
    failures = 0
    #: Set when a publish has failed.
    failed = threading.Event()

    def __init__(self, _settings: Settings) -> None:
        self.sent: list[tuple[str, bytes, Any]] = []
        self.beats = 0
        self.closed = 0
        FakePublisher.made.append(self)

    def publish(self, queue: str, blob: bytes, *, headers: Any = None) -> None:
        if FakePublisher.failures:
            FakePublisher.failures -= 1
            FakePublisher.failed.set()
            raise ConnectionError("gone")
        self.sent.append((queue, blob, headers))

    def heartbeat(self) -> None:
        self.beats += 1

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def outbox(monkeypatch: pytest.MonkeyPatch) -> Outbox:
    FakePublisher.made, FakePublisher.failures, FakePublisher.failed = [], 0, threading.Event()
    monkeypatch.setattr(outbox_module, "Publisher", FakePublisher)
    return Outbox(Settings())


def test_a_connection_is_used_again(outbox: Outbox) -> None:
    for i in range(3):
        outbox.publish("results.0", b"%d" % i)
    [publisher] = FakePublisher.made
    assert [blob for _, blob, _ in publisher.sent] == [b"0", b"1", b"2"]
    outbox.tick()
    assert publisher.beats == 1


def test_results_are_held_until_the_broker_takes_them(outbox: Outbox) -> None:
    FakePublisher.failures = 3
    outbox.publish("results.0", b"kept")
    assert [p.sent for p in FakePublisher.made if p.sent] == [[("results.0", b"kept", None)]]


def test_closing_ends_the_wait(outbox: Outbox) -> None:
    FakePublisher.failures = 10**9
    raised: list[BaseException] = []

    def publish() -> None:
        try:
            outbox.publish("results.0", b"lost")
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=publish)
    thread.start()
    assert FakePublisher.failed.wait(60)
    outbox.close()
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(raised[0], Abandoned)


def test_idle_connections_are_closed(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox.publish("results.0", b"x")
    monkeypatch.setattr(outbox_module, "IDLE_S", -1.0)
    outbox.tick()
    assert FakePublisher.made[0].closed == 1
    outbox.publish("results.0", b"y")
    assert len(FakePublisher.made) == 2
    outbox.close()
    assert FakePublisher.made[1].closed == 1


def test_the_dead_are_buried_as_they_came(outbox: Outbox) -> None:
    outbox.bury('{"täxt"}', "is\nodd ü", "infer.m.1")
    [publisher] = FakePublisher.made
    assert publisher.sent == [
        (QUEUE_DEAD, '{"täxt"}'.encode(), {"x-reason": "is?odd ?", "x-queue": "infer.m.1"}),
    ]


def test_credit() -> None:
    assert grown(3, held=3, outstanding=10, enough=40) == 4
    assert grown(3, held=2, outstanding=10, enough=40) == 3  # a place is free: there is nothing to take
    assert grown(3, held=3, outstanding=40, enough=40) == 3
    assert grown(MOST, held=MOST, outstanding=0, enough=40) == MOST
    # What is for this worker alone has a place at once.
    assert grown(3, held=3, outstanding=40, enough=40, own=2) == 5
    assert grown(3, held=2, outstanding=40, enough=40, own=1) == 3
    assert grown(3, held=5, outstanding=40, enough=40) == 3
    assert shrunk(5, base=3, outstanding=40, enough=40) == 4
    assert shrunk(5, base=3, outstanding=39, enough=40) == 5
    assert shrunk(3, base=3, outstanding=99, enough=40) == 3


def test_only_what_is_held_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_clock, "_offset", 0.0)
    calls: list[tuple[str, dict[str, float], bool]] = []

    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: Any) -> None:
            return None

        def time(self) -> tuple[int, int]:
            return int(time.time()) - 600, 0

        def zadd(self, key: str, scores: dict[str, float], xx: bool) -> None:
            calls.append((key, scores, xx))

    channel = SimpleNamespace(
        qos=SimpleNamespace(_delivered={"a": 1, "b": 2, "c": 3}, _dirty={"b"}),
        closed=False,
        conn_or_acquire=Client,
        unacked_index_key="unacked_index",
        connection_errors=(OSError,),
    )
    before = time.time()
    assert renew(channel) == 2
    [(key, scores, only_existing)] = calls
    assert key == "unacked_index"
    assert set(scores) == {"a", "c"}
    # The server's clock counts, which stands ten minutes before ours here.
    assert all(before - 602 <= score <= time.time() - 599 for score in scores.values())
    assert only_existing, "a message acked meanwhile must not come back into the index"
    channel.closed = True
    assert renew(channel) == 0


@pytest.mark.parametrize("step", [Credit, Gate, RenewVisibility])
def test_what_celery_calls_of_a_step_takes_what_celery_gives_it(step: type) -> None:
    # Blueprint.send_all looks methods up by name, with the consumer as their one argument.
    for name in ("start", "stop", "close", "shutdown", "terminate", "include", "include_if", "create", "info"):
        method = getattr(step, name, None)
        if method is not None:
            inspect.signature(method).bind("self", "consumer")
