"""`batchmill.submit` on both brokers: sent by plain Celery, as any service would."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Queue

from common.messages import QUEUE_DEAD, QUEUE_INTAKE
from common.settings import Settings
from common.store import LocalStore
from producers.batch import read_batch
from tests.support.brokers import Broker
from tests.support.processes import Process, Processes

REQUESTS = [{"custom_id": f"c{n}", "body": {"prompt": f"number {n}"}} for n in range(3)]


@pytest.fixture
def coordinator(fleet_env: dict[str, str], tmp_path: Path, processes: Processes) -> Process:
    """A coordinator that takes files from one folder."""
    (tmp_path / "in").mkdir()
    more = {
        "BATCHMILL_SECURITY_INTAKE_URLS": f"[{tmp_path}/in]",
        # A batch may ask for a cache only where one is configured; no worker runs here that would look for it.
        "BATCHMILL_CACHE_URL": "redis://127.0.0.1:2/0",
    }
    started = processes.coordinator(fleet_env | more)
    started.wait_line("leads")
    return started


@pytest.fixture
def service(broker: Broker) -> Iterator[Celery]:
    """A program that knows nothing but the broker."""
    with Celery("service", broker=broker.url, backend="rpc://", set_as_current=False) as app:
        yield app


@pytest.fixture
def store(fleet_settings: Settings) -> LocalStore:
    """The coordinator's store."""
    return LocalStore(Path(fleet_settings.store.url or ""))


def _submit(app: Celery, task_id: str | None = None, **kwargs: Any) -> Any:
    return app.send_task("batchmill.submit", kwargs=kwargs, queue="intake", task_id=task_id).get(timeout=90)


def test_inline_requests_become_a_batch(coordinator: Process, service: Celery, store: LocalStore) -> None:
    batch_id = _submit(service, requests=REQUESTS, name="n", metadata={"k": "v"}, cache="on", timeout_s=7)
    batch = read_batch(store, batch_id)
    assert (batch.requests, batch.name, batch.metadata, batch.cache, batch.timeout_s) == (3, "n", {"k": "v"}, "on", 7.0)
    coordinator.wait_line(f"batch_opened.*{batch_id}")
    assert "number" not in coordinator.text


def test_a_task_that_comes_twice_is_one_batch(coordinator: Process, service: Celery, store: LocalStore) -> None:
    task_id = str(uuid.uuid4())
    ids = {_submit(service, task_id, requests=REQUESTS) for _ in range(2)}
    ids |= {_submit(service, requests=REQUESTS, idempotency_key="k") for _ in range(2)}
    assert len(ids) == 2
    assert store.list("batches") == sorted(ids)


def test_files_are_taken_from_listed_places_only(
    coordinator: Process, service: Celery, store: LocalStore, tmp_path: Path
) -> None:
    for folder in ("in", "elsewhere"):
        path = tmp_path / folder / "x.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(r) + "\n" for r in REQUESTS))
    assert read_batch(store, _submit(service, url=f"{tmp_path}/in/x.jsonl")).requests == 3
    for bad in (f"{tmp_path}/elsewhere/x.jsonl", f"{tmp_path}/in/../elsewhere/x.jsonl"):
        with pytest.raises(ValueError, match="intake_urls"):
            _submit(service, url=bad)
    assert len(store.list("batches")) == 1


def test_what_is_wrong_is_raised_at_the_sender(coordinator: Process, service: Celery, store: LocalStore) -> None:
    with pytest.raises(ValueError, match="first, line 2: custom_id"):
        _submit(service, requests=[REQUESTS[0], REQUESTS[0]])
    with pytest.raises(ValueError, match="unknown model 'nope'"):
        _submit(service, requests=REQUESTS, model="nope")
    with pytest.raises(ValueError, match="unknown field"):
        _submit(service, requests=REQUESTS, color="red")
    assert store.list("batches") == []
    assert _submit(service, requests=REQUESTS, skip_invalid=True)


def test_what_is_no_submission_is_put_aside_and_the_next_one_is_served(
    coordinator: Process, service: Celery, broker: Broker
) -> None:
    service.send_task("somebody.elses", queue="intake")
    assert _submit(service, requests=REQUESTS).startswith("batch_")
    coordinator.wait_line("dead_letter .*queue=intake reason='not a batchmill.submit task'", 20)
    broker.wait_depth(QUEUE_DEAD, ready=0, unacked=0)
    broker.wait_depth(QUEUE_INTAKE, ready=0, unacked=0)


def test_tasks_wait_for_a_coordinator(
    service: Celery, fleet_env: dict[str, str], processes: Processes, store: LocalStore
) -> None:
    result = service.send_task("batchmill.submit", kwargs={"requests": REQUESTS}, queue="intake")
    processes.coordinator(fleet_env)
    assert read_batch(store, result.get(timeout=90)).requests == 3


def test_a_queue_that_was_declared_another_way_is_used_as_it_is(
    broker: Broker, fleet_env: dict[str, str], processes: Processes, store: LocalStore
) -> None:
    arguments = {"x-queue-type": "quorum"} if broker.kind == "rabbitmq" else {}
    theirs = Queue(QUEUE_INTAKE, durable=True, queue_arguments=arguments)
    with Connection(broker.url) as connection:
        theirs.bind(connection.default_channel).declare()
    started = processes.coordinator(fleet_env)
    if broker.kind == "rabbitmq":
        started.wait_line("intake_queue_declared_elsewhere")
    with Celery("service", broker=broker.url, backend="rpc://", set_as_current=False) as app:
        app.conf.task_queues = [theirs]
        assert read_batch(store, _submit(app, requests=REQUESTS)).requests == 3
