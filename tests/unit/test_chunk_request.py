"""Deliveries of a chunk: what is taken from a message, and how copies end together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.worker import state

from common import ids, serializer
from common.messages import TASK_INFER
from workers.request import ChunkRequest, deliveries, refusal, release_orphan


class Channel:
    """A channel of a virtual transport, open until it is closed."""

    def __init__(self) -> None:
        self.closed = False
        self.no_ack_consumers: set[str] = set()


def message(chunk_id: str, body: bytes = b"blob", channel: Any = None, **headers: Any) -> Any:
    return SimpleNamespace(
        headers={"task": TASK_INFER, "id": chunk_id, **headers},
        body=body,
        content_type=serializer.CONTENT_TYPE,
        content_encoding="binary",
        payload=((body,), {}, {}),
        delivery_info={"exchange": "", "routing_key": "infer.m.1", "redelivered": True},
        properties={"reply_to": "evil", "correlation_id": "evil"},
        channel=channel or Channel(),
        delivery_tag="tag",
        errors=[],
    )


class Outcome:
    """Notes what became of each delivery."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def request(self, name: str, chunk_id: str, **kw: Any) -> ChunkRequest:
        app = Celery("test", set_as_current=False)
        task = SimpleNamespace(acks_late=True, send_events=False, ignore_result=True, name=TASK_INFER)
        request = ChunkRequest(
            message(chunk_id, **kw),
            app=app,
            task=task,
            on_ack=lambda *_: self.told.append((name, "ack")),
            on_reject=lambda _log, _errors, requeue: self.told.append((name, f"reject requeue={requeue}")),
        )
        request.consumer = SimpleNamespace(call_soon_ack=lambda *args: self.told.append((name, "released")))
        return request


@pytest.fixture
def outcome() -> Outcome:
    return Outcome()


def test_nothing_else_of_a_message_is_obeyed(outcome: Outcome) -> None:
    chunk_id = ids.new_chunk_id()
    evil = {
        "callbacks": [1],
        "chain": [1],
        "errbacks": [1],
        "chord": 1,
        "eta": "2100-01-01T00:00:00",
        "expires": "2000-01-01T00:00:00",
        "timelimit": [1, 1],
        "shadow": "other",
        "stamped_headers": ["a"],
        "replaced_task_nesting": 5,
        "group": "g",
        "retries": 7,
        "ignore_result": False,
    }
    request = outcome.request("one", chunk_id, **evil, argsrepr="batch=b chunk=c requests=3", kwargsrepr="secret")
    assert request.name == TASK_INFER
    assert (request.eta, request.expires, request.time_limits) == (None, None, (None, None))
    assert request.ignore_result is True
    assert request.kwargsrepr == "{}"
    assert not set(evil) - {"group", "ignore_result"} & set(request.request_dict)
    assert request.request_dict["group"] is None
    assert request.info(safe=False)["args"] == "batch=b chunk=c requests=3"
    assert request.info()["kwargs"] == "{}"


@pytest.mark.parametrize("shown", [None, 5, "x" * 1000, "a prompt\nwith lines", "('quotes',)", ""])
def test_only_ids_and_counts_are_shown(outcome: Outcome, shown: Any) -> None:
    chunk_id = ids.new_chunk_id()
    assert outcome.request("one", chunk_id, argsrepr=shown).argsrepr == f"chunk={chunk_id}"


def test_a_copy_joins_and_all_are_acked_the_newest_first(outcome: Outcome) -> None:
    chunk_id = ids.new_chunk_id()
    one, two, three = (outcome.request(name, chunk_id) for name in ("one", "two", "three"))
    assert deliveries.arrive(one)
    state.task_reserved(one)
    for copy in (two, three):
        assert not deliveries.arrive(copy)
        state.task_reserved(copy)
    assert deliveries.owner(three) is one
    one.acknowledge()
    assert outcome.told == [("three", "ack"), ("two", "ack"), ("one", "ack")]
    assert chunk_id not in state.requests
    one.acknowledge()
    assert len(outcome.told) == 3
    # What comes later is new.
    later = outcome.request("later", chunk_id)
    assert deliveries.arrive(later)
    deliveries.settle(later)


def test_a_delivery_whose_connection_broke_is_left_alone(outcome: Outcome) -> None:
    chunk_id, broken = ids.new_chunk_id(), Channel()
    one, two = outcome.request("one", chunk_id, channel=broken), outcome.request("two", chunk_id)
    deliveries.arrive(one)
    deliveries.arrive(two)
    broken.closed = True
    one.acknowledge()
    assert outcome.told == [("two", "ack"), ("one", "released")]
    assert one.acknowledged


def test_giving_back_gives_all_back(outcome: Outcome) -> None:
    chunk_id, broken = ids.new_chunk_id(), Channel()
    broken.closed = True
    one, two = outcome.request("one", chunk_id, channel=broken), outcome.request("two", chunk_id)
    deliveries.arrive(one)
    deliveries.arrive(two)
    one.reject(requeue=True)
    assert outcome.told == [("two", "reject requeue=True")]


def test_another_message_under_the_same_id_does_not_join(outcome: Outcome) -> None:
    chunk_id = ids.new_chunk_id()
    one, other = outcome.request("one", chunk_id), outcome.request("other", chunk_id, body=b"different")
    assert deliveries.arrive(one)
    assert deliveries.arrive(other)
    other.acknowledge()
    assert outcome.told == [("other", "ack")]
    one.acknowledge()
    assert outcome.told == [("other", "ack"), ("one", "ack")]


def test_rabbitmq_channels(outcome: Outcome) -> None:
    chunk_id = ids.new_chunk_id()
    gone = SimpleNamespace(is_open=False, connection=None)
    here = SimpleNamespace(is_open=True, connection=object())
    one, two = outcome.request("one", chunk_id, channel=gone), outcome.request("two", chunk_id, channel=here)
    deliveries.arrive(one)
    deliveries.arrive(two)
    one.acknowledge()
    assert outcome.told == [("two", "ack"), ("one", "released")]


def test_a_revoke_of_a_copy_reaches_the_one_that_runs(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_id = ids.new_chunk_id()
    one, two = outcome.request("one", chunk_id), outcome.request("two", chunk_id)
    deliveries.arrive(one)
    deliveries.arrive(two)
    terminated: list[int] = []
    one.time_start, one.worker_pid = 1.0, 42
    monkeypatch.setattr(one, "_announce_revoked", lambda *_: None)
    two.terminate(SimpleNamespace(terminate_job=lambda pid, _signal: terminated.append(pid)))
    assert terminated == [42]
    deliveries.settle(one)


def test_orphans_are_released_on_redis_alone() -> None:
    removed: list[str] = []

    def remove(tag: str) -> Any:
        return SimpleNamespace(execute=lambda: removed.append(tag))

    def consumer(driver: str) -> Any:
        qos = SimpleNamespace(_remove_from_indices=remove)
        return SimpleNamespace(
            connection=SimpleNamespace(transport=SimpleNamespace(driver_type=driver)),
            task_consumer=SimpleNamespace(channel=SimpleNamespace(qos=qos)),
            connection_errors=(OSError,),
        )

    lost = message(ids.new_chunk_id())
    release_orphan(consumer("amqp"), lost)
    release_orphan(SimpleNamespace(connection=None), lost)
    assert removed == []
    release_orphan(consumer("redis"), lost)
    assert removed == ["tag"]


def test_refusals() -> None:
    chunk_id = ids.new_chunk_id()
    assert refusal(message(chunk_id)) is None
    for change in (
        {"content_type": "application/json"},
        {"content_type": None},
        {"headers": None},
        {"headers": {"task": "other", "id": chunk_id}},
        {"headers": {"task": TASK_INFER, "id": "chunk_../../etc"}},
        {"headers": {"task": TASK_INFER}},
        {"body": None},
        {"errors": [1]},
    ):
        bad = message(chunk_id)
        for name, value in change.items():
            setattr(bad, name, value)
        assert refusal(bad), change
