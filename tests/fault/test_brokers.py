"""Brokers and networks that end, forget, hang up, stall or fill up in mid-batch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.fault import brokers
from tests.fault.fleet import READY, Fleet
from tests.fault.proxy import Proxy
from tests.fault.table import case
from tests.support.brokers import RabbitBroker, RabbitServer, RedisBroker, rabbit_server
from tests.support.ports import wait_until


def start_and_settle(fleet: Fleet) -> None:
    fleet.start()
    warm = fleet.submit(20)
    wait_until(lambda: fleet.status(warm).status == "completed", 60, "all queues are in use")
    fleet.broker.wait_saved()


@case("11", "kill -9 the broker, start it again", quick="redis")
def test_broker_killed(fleet: Fleet) -> None:
    start_and_settle(fleet)
    fleet.submit()
    fleet.wait_progress()
    with fleet.fault():
        fleet.broker.kill()
        time.sleep(3)
        fleet.broker.start()
    fleet.finish()


@case("12", "broker and live state wiped: started again with no data", quick="rabbitmq")
def test_broker_wiped(fleet: Fleet) -> None:
    fleet.start()
    fleet.submit()
    fleet.wait_progress()
    with fleet.fault():
        brokers.lose_disk(fleet.broker)
    fleet.finish()


@case("13", "the broker closes all connections, eight times", quick="redis")
def test_connections_closed(fleet: Fleet) -> None:
    fleet.start()
    fleet.submit(4000)
    fleet.wait_progress(0.15)
    rounds = 0
    with fleet.fault():
        deadline = time.monotonic() + 90
        # Some looks find everybody on the way back, or RabbitMQ without a list of them yet.
        while rounds < 8 and time.monotonic() < deadline:
            rounds += brokers.drop_clients(fleet.broker) > 0
            time.sleep(0.7)
    assert rounds >= 4
    fleet.finish()


def through(url: str, proxy: Proxy) -> str:
    """A server's URL by way of a proxy."""
    parts = urlsplit(url)
    return url.replace(f":{parts.port}/", f":{proxy.port}/")


def port(url: str) -> int:
    found = urlsplit(url).port
    assert found is not None
    return found


@case("14", "network between a worker and the broker cut for 60 s")
def test_network_cut(fleet: Fleet) -> None:
    broker = fleet.broker
    with Proxy(port(broker.url)) as queues, Proxy(port(broker.state_url)) as state:
        fleet.start(workers=1)
        cut = fleet.start_worker(
            BATCHMILL_BROKER_URL=through(broker.url, queues), BATCHMILL_STATE_URL=through(broker.state_url, state)
        )
        cut.wait_line(READY, 60)
        fleet.submit()
        fleet.wait_progress()
        with fleet.fault():
            queues.cut()
            state.cut()
            time.sleep(60)
            queues.mend()
            state.mend()
        # It must be of use again.
        seen = len(cut.lines)
        fleet.submit()
        cut.wait_line("succeeded in", 90, after=seen)
        fleet.finish()


@case("15", "slow network: 200 ms each way, for everybody")
def test_slow_network(fleet: Fleet) -> None:
    broker = fleet.broker
    with Proxy(port(broker.url), 0.2) as queues, Proxy(port(broker.state_url), 0.2) as state:
        with fleet.fault():
            fleet.start(
                BATCHMILL_BROKER_URL=through(broker.url, queues),
                BATCHMILL_STATE_URL=through(broker.state_url, state),
            )
            fleet.submit()
            fleet.wait_progress(0.5)
        fleet.finish()


@case("24a", "work outlasts what the broker waits for an ack", brokers=("redis",))
def test_visibility_timeout(fleet: Fleet) -> None:
    """Redis: kombu hands a message on that is unacked for `visibility_timeout_s`."""
    with fleet.fault():
        fleet.start(BATCHMILL_ECHO_FAULTS="SLOW=slow:25", BATCHMILL_BROKER_VISIBILITY_TIMEOUT_S="4")
        fleet.submit(marks=dict.fromkeys(range(0, 2000, 250), "SLOW"))
        fleet.wait_progress()
    fleet.finish()


@pytest.fixture
def impatient(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A RabbitMQ of the case's own, which ends a channel whose delivery is unacked for 4 s; the fleet's from now on.

    A server-wide setting: 3.10 knows no `x-consumer-timeout`.
    """
    with rabbit_server(tmp_path_factory.mktemp("impatient"), "consumer_timeout = 4000\n") as server:
        before = fleet.broker
        assert isinstance(before, RabbitBroker)
        fleet.broker = RabbitBroker(server, before.state_server)
        fleet.env |= {"BATCHMILL_BROKER_URL": fleet.broker.url, "BATCHMILL_STATE_URL": fleet.broker.state_url}
        yield server
        # The case's processes must find their broker when they end.
        fleet.processes.close()


@case("24b", "work outlasts the broker's consumer_timeout", brokers=("rabbitmq",))
def test_consumer_timeout(fleet: Fleet, impatient: RabbitServer) -> None:
    with fleet.fault():
        fleet.start(BATCHMILL_ECHO_FAULTS="SLOW=slow:15")
        fleet.submit(marks=dict.fromkeys(range(0, 2000, 250), "SLOW"))
        fleet.wait_progress()
    fleet.finish()
    assert any("PRECONDITION_FAILED" in w.text or "timeout" in w.text.lower() for w in fleet.workers)


@case(
    "24c",
    "messages redelivered up to the queue's limit, then the workers end",
    brokers=("rabbitmq",),
)
def test_delivery_limit(fleet: Fleet) -> None:
    fleet.start(BATCHMILL_BROKER_DELIVERY_LIMIT="1", BATCHMILL_ECHO_FAULTS="SLOW=slow:15")
    fleet.submit(marks=dict.fromkeys(range(0, 2000, 100), "SLOW"))
    fleet.wait_progress(0.1)
    with fleet.fault():

        def over_the_limit() -> bool:
            brokers.drop_clients(fleet.broker)
            return fleet.dead_letters() > 0

        wait_until(over_the_limit, 60, "a message goes over the limit", 1.0)
        for worker in fleet.workers:
            fleet.child(worker).kill()
    fleet.finish()


@case("25", "Redis reaches maxmemory", quick="redis")
def test_redis_full(fleet: Fleet) -> None:
    """As broker it holds the queues; beside RabbitMQ, the live state alone."""
    fleet.start()
    batch = fleet.submit(4000)
    fleet.wait_progress(0.15)
    with contextlib.closing(fleet.broker.state) as client:
        with fleet.fault():
            try:
                client.config_set("maxmemory", int(client.info("memory")["used_memory"]))
                if isinstance(fleet.broker, RedisBroker):
                    wait_until(lambda: fleet.status(batch).reason == "broker_memory", 30, "the status says so")
                time.sleep(6)
            finally:
                client.config_set("maxmemory", 0)
        fleet.finish()
