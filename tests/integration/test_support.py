"""The test support itself: what it says of brokers and processes is true."""

from __future__ import annotations

import signal

import kombu
import psutil
import pytest

from common import broker as broker_module
from common.publisher import Publisher
from common.settings import Settings
from tests.support.brokers import Broker, Depth, RabbitBroker, RedisBroker
from tests.support.ports import wait_until
from tests.support.processes import Processes


def test_depth_counts_ready_and_unacked(broker: Broker, fleet_settings: Settings) -> None:
    publisher = Publisher(fleet_settings)
    for _ in range(3):
        publisher.publish("infer.x.1", b"blob")
    publisher.close()
    broker.wait_depth("infer.x.1", ready=3, unacked=0)
    with broker_module.connect(fleet_settings) as connection:
        channel = connection.channel()
        message = broker_module.queue(fleet_settings, "infer.x.1").bind(channel).get()
        assert message is not None
        broker.wait_depth("infer.x.1", ready=2, unacked=1)
        assert broker.queues() == ["infer.x.1"]
        message.ack()
        broker.wait_depth("infer.x.1", ready=2, unacked=0)
    broker.purge("infer.x.1")
    broker.wait_depth("infer.x.1", ready=0, unacked=0)


def test_a_killed_broker_comes_back_with_what_it_had(broker: Broker, fleet_settings: Settings) -> None:
    publisher = Publisher(fleet_settings)
    publisher.publish("infer.x.1", b"blob")
    publisher.close()
    broker.wait_saved("infer.x.1")
    broker.restart()
    broker.wait_depth("infer.x.1", ready=1)
    broker.wipe()
    wait_until(lambda: (broker.depth("infer.x.1"), broker.queues()) == (Depth(0, 0), []), 30, "nothing is left")


def test_brokers_of_two_tests_do_not_see_each_other(broker: Broker, request: pytest.FixtureRequest) -> None:
    with kombu.Connection(broker.url) as connection:
        connection.SimpleQueue("left-by-me").put("x")
    broker.wait_depth("left-by-me", ready=1)
    # Another corner of the same servers, as the next test gets it.
    redis_process = request.getfixturevalue("redis_process")
    again = (
        RedisBroker(redis_process)
        if broker.kind == "redis"
        else RabbitBroker(request.getfixturevalue("rabbit_process"), redis_process)
    )
    assert again.queues() == []


def test_processes_leave_nothing_behind(processes: Processes) -> None:
    # A child in its own session that ignores SIGTERM, as the worst of daemons would.
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child up', flush=True); "
        "time.sleep(600)"
    )
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    process = processes.python("parent", "-c", code)
    process.wait_line("child up", 20)
    pids = [p.pid for p in processes.survivors()]
    assert len(pids) == 2
    process.signal(signal.SIGKILL)
    assert process.popen.wait(60) == -signal.SIGKILL
    wait_until(lambda: len(processes.survivors()) == 1, 20, "the child alone is left")
    processes.close()
    assert processes.survivors() == []
    assert not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids)


def test_a_process_that_shows_a_title_is_found(processes: Processes) -> None:
    # As a worker does it; without this, whoever looks for what is left would see no worker and no engine.
    code = (
        "import time; from celery import platforms; platforms.set_process_title('workers ' + 'x' * 100); "
        "print('titled', flush=True); time.sleep(600)"
    )
    process = processes.python("titled", "-c", code)
    process.wait_line("titled", 20)
    assert [p.pid for p in processes.survivors()] == [process.pid]


def test_wait_line_fails_with_the_last_lines_when_the_process_ends(processes: Processes) -> None:
    process = processes.python("short", "-c", "print('only this')")
    with pytest.raises(AssertionError, match=r"(?s)it ended.*only this"):
        process.wait_line("never", 20)
    assert process.wait(10) == 0
