"""Publishing on real brokers: confirmed or an error, never a silent loss."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import redis
from amqp.exceptions import MessageNacked
from kombu import Consumer, Queue
from redis.connection import AbstractConnection

from common import publisher as publisher_module
from common.broker import connect, queue
from common.errors import Unreachable
from common.live import LiveState, WorkerFacts
from common.publisher import Publisher
from common.serializer import CONTENT_TYPE
from common.settings import Settings, load
from tests.conftest import make_fleet_env
from tests.fault.proxy import Proxy
from tests.support.brokers import Broker, RabbitBroker, RedisBroker
from tests.support.ports import wait_until


def test_a_message_arrives_as_it_was_sent(broker: Broker, fleet_settings: Settings) -> None:
    publisher = Publisher(fleet_settings)
    publisher.begin_task("infer.m.1", "batchmill.infer_chunk", "chunk_1", b"\x00blob\xff", "requests=1")
    publisher.settle()
    publisher.close()
    got: list[tuple[Any, Any]] = []
    with connect(fleet_settings) as connection:
        with Consumer(
            connection,
            queues=[queue(fleet_settings, "infer.m.1")],
            callbacks=[lambda body, message: got.append((body, message))],
            accept=[CONTENT_TYPE],
        ):
            connection.drain_events(timeout=60)
            got[0][1].ack()
    body, message = got[0]
    assert body == ((b"\x00blob\xff",), {}, {})
    assert message.headers["task"] == "batchmill.infer_chunk"
    assert message.headers["argsrepr"] == "requests=1"


@pytest.mark.parametrize("settled", [False, True])
def test_a_publisher_goes_on_after_a_restart_of_the_broker(
    broker: Broker, fleet_settings: Settings, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`settled`: RabbitMQ has written down that the queue exists; killed before, it comes back with a dead queue."""
    monkeypatch.setattr(publisher_module, "CONFIRM_TIMEOUT_S", 3)
    publisher = Publisher(fleet_settings)
    publisher.publish("results.0", b"one")
    if settled:
        broker.wait_saved("results.0")
    broker.restart()
    deadline = time.monotonic() + 60
    while True:
        try:
            publisher.publish("results.0", b"two")
            break
        except Exception:  # whatever the transport raises: the next call starts on a new connection
            assert time.monotonic() < deadline
    publisher.close()
    # One that was tried again may be there twice; one in a dead queue is not there at all.
    least = 2 if settled or broker.kind == "redis" else 1
    wait_until(lambda: broker.depth("results.0").ready >= least, 30, "the messages are there")


def test_a_broker_that_is_down_is_one_line(broker: Broker, fleet_settings: Settings) -> None:
    broker.kill()
    with pytest.raises(Unreachable, match="does not answer") as caught:
        Publisher(fleet_settings).publish("results.0", b"x")
    assert "\n" not in str(caught.value)
    assert "guest:guest" not in str(caught.value)


def test_a_queue_that_vanished_fails_the_publish(
    rabbit_broker: RabbitBroker, tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    settings = load(env={"BATCHMILL_BROKER_URL": rabbit_broker.url, "BATCHMILL_STATE_URL": rabbit_broker.state_url})
    publisher = Publisher(settings)
    publisher.publish("results.0", b"one")
    rabbit_broker.wipe()
    with pytest.raises(Exception, match=r"NO_ROUTE|312"):
        publisher.publish("results.0", b"lost")
    publisher.publish("results.0", b"found")  # declares it again
    publisher.close()
    rabbit_broker.wait_depth("results.0", ready=1)


def test_a_redis_channel_makes_one_client_for_each_pool(redis_broker: RedisBroker, tmp_path: Path) -> None:
    settings = load(env=make_fleet_env(tmp_path, redis_broker.url, redis_broker.state_url))
    with connect(settings) as connection:
        channel = connection.default_channel
        with channel.conn_or_acquire() as first, channel.conn_or_acquire() as second:
            assert first is second
        channel._disconnect_pools()  # what kombu does to a channel that it closes
        with channel.conn_or_acquire() as third:
            assert third is not first
            assert third.ping()


def test_an_ack_whose_connection_is_lost_on_its_way_goes_once_more(
    redis_broker: RedisBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocking read may not have noticed anything: nobody would come back to that message."""
    settings = load(env=make_fleet_env(tmp_path, redis_broker.url, redis_broker.state_url))
    publisher = Publisher(settings)
    publisher.publish("results.0", b"one")
    publisher.close()
    got: list[Any] = []
    with (
        connect(settings) as connection,
        Consumer(
            connection,
            queues=[queue(settings, "results.0")],
            callbacks=[lambda body, message: got.append(message)],
            accept=[CONTENT_TYPE],
        ),
        redis.Redis.from_url(redis_broker.url) as other,
    ):
        connection.drain_events(timeout=60)
        # redis-py looks at a connection before it uses it; this one is lost after that.
        monkeypatch.setattr(AbstractConnection, "can_read", lambda *args, **options: False)
        assert other.client_kill_filter(_type="normal", skipme=True) > 0
        got[0].ack()
        assert other.exists("unacked", "unacked_index") == 0


def test_live_state_notices_a_wipe(broker: Broker, fleet_settings: Settings) -> None:
    live = LiveState(fleet_settings)
    live.check()
    before = live.generation()
    assert live.generation() == before
    live.renew_leases(["chunk_1", "chunk_2"], "node", 300)
    assert live.leases(["chunk_1", "none"]) == ["node", None]
    live.drop_leases(["chunk_1"])
    assert live.leases(["chunk_1", "chunk_2"]) == [None, "node"]
    facts = WorkerFacts(
        node="n", model="m@1", host="h", pid=1, device="cpu0", engine="echo", state="ready", max_num_seqs=8,
        chunks_in_flight=3,
    )  # fmt: skip
    live.announce(facts)
    other = msgspec.structs.replace(facts, node="a")
    live.announce(other)
    assert live.workers() == [other, facts]
    live.withdraw("a")
    assert live.workers() == [facts]
    live.announce(other)
    broker.state.delete("bm:worker:a")  # As its time to live does.
    assert live.workers() == live.workers() == [facts]
    assert broker.state.smembers("bm:workers") == {b"n"}
    live.mark_cancelled("batch_a")
    assert live.cancelled(["batch_a", "batch_b"]) == {"batch_a"}
    broker.wipe_state()
    assert live.generation() != before
    assert live.workers() == []
    live.close()


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_an_idle_publisher_keeps_its_connection(broker: Broker, fleet_env: dict[str, str]) -> None:
    publisher = Publisher(load(env=fleet_env | {"BATCHMILL_BROKER_HEARTBEAT_S": "2"}))
    publisher.publish("results.0", b"one")
    connection = publisher._connection
    deadline = time.monotonic() + 6  # Both sides give up on a peer that is silent for two heartbeats.
    while time.monotonic() < deadline:
        publisher.heartbeat()
        time.sleep(0.2)
    publisher.publish("results.0", b"two")
    assert publisher._connection is connection
    publisher.close()


def test_several_messages_are_on_their_way_at_once(broker: Broker, fleet_settings: Settings) -> None:
    publisher = Publisher(fleet_settings)
    most = 0
    for number in range(40):
        publisher.begin("results.0", b"%d" % number, key=f"k{number}")
        publisher.settle(16)
        most = max(most, len(publisher.waiting()))
    assert most <= (16 if broker.kind == "rabbitmq" else 0)
    publisher.settle()
    assert publisher.waiting() == set()
    assert sorted(publisher.confirmed()) == sorted(f"k{number}" for number in range(40))
    assert publisher.confirmed() == []
    publisher.close()
    wait_until(lambda: broker.depth("results.0").ready == 40, 30, "all are there")


def test_a_slow_confirm_is_not_waited_for_by_each_message(rabbit_broker: RabbitBroker, tmp_path: Path) -> None:
    port = urlsplit(rabbit_broker.url).port
    assert port is not None
    with Proxy(port, delay_s=0.05) as line:
        url = rabbit_broker.url.replace(f":{port}/", f":{line.port}/")
        publisher = Publisher(load(env=make_fleet_env(tmp_path, url, rabbit_broker.state_url)))
        publisher.publish("results.0", b"declares the queue")
        began = time.monotonic()
        for number in range(40):
            publisher.begin("results.0", b"x", key=f"k{number}")
            publisher.settle(16)
        publisher.settle()
        took = time.monotonic() - began
        publisher.close()
    assert len(publisher.confirmed()) == 40
    assert took < 40 * 0.1, "each has waited for the one before: there and back takes 0.1 s"


def test_a_refused_message_takes_no_other_with_it(rabbit_broker: RabbitBroker, tmp_path: Path) -> None:
    settings = load(env=make_fleet_env(tmp_path, rabbit_broker.url, rabbit_broker.state_url))
    bounds = {"x-max-length": 1, "x-overflow": "reject-publish"}
    with connect(settings) as connection:
        Queue("infer.full.1", durable=True, queue_arguments=bounds).bind(connection.default_channel).declare()
    publisher = Publisher(settings)
    publisher._declared.add("infer.full.1")
    publisher.begin("infer.full.1", b"x", key="fits")
    publisher.settle()
    for name, key in (("infer.full.1", "too many"), ("results.0", "other"), ("results.0", "another")):
        publisher.begin(name, b"x", key=key)
    with pytest.raises(MessageNacked, match=r"infer\.full\.1"):
        publisher.settle()
    assert publisher.confirmed() == ["fits", "other", "another"]
    assert publisher.waiting() == set()
    publisher.close()
