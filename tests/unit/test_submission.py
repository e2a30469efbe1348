"""What `batchmill.submit` takes, and what it is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidInput, Unreachable, UsageError
from producers.coordinator.submission import MAX_INLINE, allowed, failure, read, success, task_id_of

ONE = {"custom_id": "a", "body": {"prompt": "a secret"}}


def _body(*args: Any, **kwargs: Any) -> bytes:
    """A task's body, as Celery's protocol 2 has it."""
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    return json.dumps([args, kwargs, embed]).encode()


def test_requests_and_options() -> None:
    wish = read(_body(requests=[ONE, ONE], model="m", metadata={"k": "v"}, timeout_s=5, idempotency_key="key"), [])
    assert [json.loads(line) for line in wish.lines().splitlines()] == [ONE, ONE]
    options = wish.options("task-1")
    assert (options.model, options.metadata, options.timeout_s) == ("m", {"k": "v"}, 5.0)
    assert options.idempotency_key == "key"
    # A message that is delivered twice is one batch.
    assert read(_body(requests=[ONE]), []).options("task-1").idempotency_key == "celery task task-1"


def test_a_sender_may_write_its_json_over_several_lines() -> None:
    pretty = json.dumps([[], {"requests": [ONE, ONE]}, {}], indent=2).encode()
    assert [json.loads(line) for line in read(pretty, []).lines().splitlines()] == [ONE, ONE]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (_body(requests=[ONE], nonsense=1), "unknown field `nonsense`"),
        (_body(requests="x"), r"Expected `array \| null`, got `str`"),
        (_body([ONE]), "keyword arguments only"),
        (_body(), "either requests= or url="),
        (_body(requests=[], url="s3://b/in/x"), "either requests= or url="),
        (_body(url="s3://elsewhere/x"), "intake_urls"),
        (b"not json", "not the arguments"),
        (b"[1, 2]", "not the arguments"),
        (b" " * (MAX_INLINE + 1), "name a file with url="),
    ],
)
def test_what_is_wrong_is_said_without_what_it_holds(body: bytes, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read(body, ["s3://b/in"])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "fine"),
    [
        ("s3://b/in/x.jsonl", True),
        ("s3://b/in/deep/x.jsonl", True),
        ("s3://b/in", False),
        ("s3://b/inner/x.jsonl", False),
        ("s3://b/in/../out/x.jsonl", False),
        ("s3://b/in/%2e%2e/out/x.jsonl", False),
        ("simplecache::s3://b/in/x.jsonl", False),
        ("https://host/in/x", True),
        ("https://host.evil/in/x", False),
        ("https://user@host/in/x", False),
        ("/etc/passwd", False),
        ("-", False),
    ],
)
def test_urls_are_taken_only_from_below_the_list(url: str, fine: bool) -> None:
    assert allowed(url, ["s3://b/in", "https://host/in/"]) is fine
    assert not allowed(url, [])


def test_paths_count_by_where_they_lead(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret").touch()
    (inside / "link").symlink_to(outside / "secret")
    (inside / "file").touch()
    for prefix in (str(inside), f"file://{inside}/"):
        assert allowed(str(inside / "file"), [prefix])
        assert allowed(f"file://{inside}/file", [prefix])
        assert not allowed(str(inside / "link"), [prefix])
        assert not allowed(str(outside / "secret"), [prefix])


def test_replies_are_celerys() -> None:
    assert success("t", "batch_1") == {
        "task_id": "t",
        "status": "SUCCESS",
        "result": "batch_1",
        "traceback": None,
        "children": [],
    }
    refused = failure("t", InvalidInput("line 3"))
    assert (refused["status"], refused["result"]["exc_type"]) == ("FAILURE", "ValueError")
    assert failure("t", Unreachable("away"))["result"]["exc_type"] == "ConnectionError"


@pytest.mark.parametrize(
    ("headers", "task_id"),
    [
        ({"task": "batchmill.submit", "id": "x"}, "x"),
        ({"task": "batchmill.infer_chunk", "id": "x"}, None),
        ({"task": "batchmill.submit"}, None),
        ({"task": "batchmill.submit", "id": 7}, None),
        ({"task": "batchmill.submit", "id": "x" * 300}, None),
        ({}, None),
    ],
)
def test_only_our_task_is_one(headers: dict[str, Any], task_id: str | None) -> None:
    assert task_id_of(headers) == task_id
