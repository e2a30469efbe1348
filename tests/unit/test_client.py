"""The Python client against a store in which the test plays coordinator."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import InvalidInput, Unreachable, UsageError
from common.ids import new_batch_id
from common.lines import answer_line
from common.registry import ModelVersion, Registry
from common.settings import Settings
from common.store import LocalStore
from producers.batch import read_batch
from producers.batch_view import BatchView
from producers.client import Client
from tests.support import oracle, stored

MODELS = Registry({stored.MODEL: ModelVersion(source="x")}, {}, stored.MODEL)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with a coordinator that was seen a moment ago, so that no broker is asked."""
    store = LocalStore(tmp_path / "store")
    stored.heartbeat(store, time.time())
    return store


@pytest.fixture
def client(store: LocalStore) -> Iterator[Client]:
    """A client of a fleet whose broker nobody answers at."""
    urls = {"store": store.url, "broker": "redis://127.0.0.1:1/0", "cache": "redis://127.0.0.1:2/0"}
    settings = msgspec.convert({section: {"url": url} for section, url in urls.items()}, Settings)
    with Client(settings, MODELS) as client:
        yield client


def _requests(count: int) -> Iterator[dict[str, Any]]:
    for n in range(count):
        yield {"custom_id": f"c{n}", "body": {"prompt": f"Number {n} \u2028"}}


@pytest.mark.parametrize("how", ["iterable", "list", "file", "path", "str"])
def test_submit_takes_paths_files_and_requests(client: Client, store: LocalStore, tmp_path: Path, how: str) -> None:
    raw = "".join(json.dumps(r) + "\n" for r in _requests(1000)).encode()
    path = tmp_path / "in.jsonl"
    path.write_bytes(raw)
    sources: dict[str, Any] = {
        "iterable": _requests(1000),
        "list": list(_requests(1000)),
        "file": io.BytesIO(raw),
        "path": path,
        "str": str(path),
    }
    seen = client.submit(sources[how], name="n", metadata={"k": "v"}, timeout_s=5.0, cache="on")
    assert (seen.status, seen.reason, seen.name, seen.metadata) == ("queued", None, "n", {"k": "v"})
    assert seen.request_counts.total == 1000
    batch = read_batch(store, seen.id)
    assert (batch.planned, batch.model, batch.timeout_s, batch.cache) == (1000, stored.MODEL, 5.0, "on")
    assert store.list("active/0") == [seen.id]


def test_submit_of_a_bad_line_reports_and_enqueues_nothing(client: Client, store: LocalStore) -> None:
    with pytest.raises(InvalidInput) as caught:
        client.submit([{"custom_id": "a", "body": {"prompt": "x"}}, {"custom_id": "a", "body": {"prompt": "y"}}])
    (fault,) = caught.value.report.errors  # type: ignore[attr-defined]
    assert (fault.line, fault.field) == (2, "custom_id")
    assert store.list("batches") == []
    seen = client.submit([{"custom_id": "a", "body": {"prompt": "x"}}, {"custom_id": "b"}], skip_invalid=True)
    assert (seen.request_counts.total, seen.request_counts.failed) == (2, 1)


@pytest.mark.parametrize("wrong", [{"custom_id": "a"}, b"{}", io.StringIO("{}")])
def test_submit_says_what_it_takes(client: Client, wrong: Any) -> None:
    with pytest.raises(UsageError, match="submit takes a"):
        client.submit(wrong)


def test_submit_finds_out_that_nobody_is_there(client: Client, store: LocalStore) -> None:
    stored.heartbeat(store, time.time() - 100)
    with pytest.raises(Unreachable, match="does not answer"):
        client.submit(_requests(1))
    assert store.list("batches") == []


def test_an_idempotency_key_is_one_batch(client: Client) -> None:
    ids = {client.submit(_requests(3), idempotency_key="k").id for _ in range(3)}
    assert len(ids) == 1


def test_what_is_told_the_coordinator(client: Client, store: LocalStore) -> None:
    of = client.submit(_requests(3), completion_window="24h", priority="low", tenant="lab", run_between="22:00-06:00")
    assert (of.priority, of.tenant, of.run_between) == ("low", "lab", "22:00-06:00 UTC")
    assert of.expires_at == of.created_at + 86400
    for ask in (client.pause, client.resume_dispatch, lambda i: client.reprioritize(i, "high"), client.cancel):
        assert ask(of.id).id == of.id
    told = [json.loads(store.read(f"control/{of.id}/{name}")) for name in store.list(f"control/{of.id}")]
    # Named by the time, so that they are obeyed in this order.
    assert [t["command"] for t in told] == ["pause", "resume", "reprioritize", "cancel"]
    with pytest.raises(UsageError, match="'huge' is not one of"):
        client.reprioritize(of.id, "huge")


def test_a_retry_is_read_with_what_it_retries(client: Client, store: LocalStore) -> None:
    of = client.submit(_requests(4))
    with pytest.raises(UsageError, match="only a batch that has ended"):
        client.retry(of.id)
    first = read_batch(store, of.id)
    stored.status(store, first, "expired", 2, 2)
    stored.outputs(store, first, {1, 3})
    again = client.retry(of.id, priority="urgent")
    assert (again.retry_of, again.priority, again.request_counts.total) == (of.id, "urgent", 2)
    second = read_batch(store, again.id)
    stored.status(store, second, "completed", 2)
    # The support's outputs are named c0, c1, …; those of a retry have the names that it was given.
    lines = [answer_line(second.id, n, b'"c%d"' % i, 200, b'{"again":1}', b"{}") for n, i in enumerate((1, 3))]
    stored.put_outputs(store, second.id, b"".join(lines), b"")
    found = list(client.results(again.id, merged=True))
    assert [line["custom_id"] for line in found] == ["c0", "c1", "c2", "c3"]
    assert [line["response"]["body"] for line in found] == [{"n": 0}, {"again": 1}, {"n": 2}, {"again": 1}]


def test_wait_ends_with_the_batch_and_tells_on_the_way(client: Client, store: LocalStore) -> None:
    of = stored.batch(store)
    views: list[BatchView] = []
    noticed = threading.Event()

    def update(seen: BatchView) -> None:
        views.append(seen)
        noticed.set()

    def finish() -> None:
        assert noticed.wait(60)
        stored.outputs(store, of, {3})
        stored.status(store, of, "completed", 9, 1)

    thread = threading.Thread(target=finish)
    thread.start()
    ended = client.wait(of.id, timeout_s=30, on_update=update)
    thread.join()
    assert ended.status == "completed"
    assert views[0].status == "queued"
    assert views[-1] == ended == client.status(of.id)


def test_wait_gives_up_in_time(client: Client, store: LocalStore) -> None:
    of = stored.batch(store)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=f"{of.id} has not ended within 0.2 s"):
        client.wait(of.id, timeout_s=0.2)
    assert time.monotonic() - began < 60


def test_results_come_in_the_order_of_the_input(client: Client, store: LocalStore, tmp_path: Path) -> None:
    of = stored.batch(store, requests=50)
    with pytest.raises(UsageError, match="has ended; use wait"):
        client.results(of.id)
    with pytest.raises(UsageError, match="has not ended"):
        client.save(of.id, tmp_path / "out")
    stored.outputs(store, of, {0, 7, 49})
    stored.status(store, of, "completed", 47, 3)
    lines = list(client.results(of.id))
    assert [line["custom_id"] for line in lines] == [f"c{n}" for n in range(50)]
    assert [n for n, line in enumerate(lines) if line["response"] is None] == [0, 7, 49]
    put = client.save(of.id, tmp_path / "out")
    assert put.output == str(tmp_path / "out" / "output.jsonl")
    oracle.check(tmp_path / "out", of.id, [f"c{n}" for n in range(50)], partial=True)


def test_list_and_cancel(client: Client, store: LocalStore) -> None:
    old, new = stored.batch(store), stored.batch(store)
    assert [seen.id for seen in client.list()] == [new.id, old.id]
    assert [seen.id for seen in client.list(1)] == [new.id]
    assert client.cancel(old.id).status == "queued"
    assert len(store.list(f"control/{old.id}")) == 1
    with pytest.raises(UsageError, match="no batch"):
        client.cancel(new_batch_id())


def test_who_is_missing_is_seen(client: Client, store: LocalStore) -> None:
    stored.heartbeat(store, time.time() - 100)
    assert client.status(stored.batch(store).id).reason == "no_coordinator"


def test_many_batches_are_submitted_at_once(client: Client, store: LocalStore) -> None:
    ids = list(client.submit_many((_requests(n + 1) for n in range(5)), name="many"))
    assert [read_batch(store, batch_id).requests for batch_id in ids] == [1, 2, 3, 4, 5]
    assert client.status(ids[0]).name == "many"
    assert sorted(store.list("active/0")) == sorted(ids)
    with pytest.raises(InvalidInput, match="source 1"):
        list(client.submit_many([_requests(1), [{"custom_id": ""}]]))
    assert len(store.list("active/0")) == 6
