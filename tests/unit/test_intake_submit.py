"""`submit` and `validate` as the command line and the coordinator use them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from common.errors import UsageError
from common.messages import Row
from common.registry import ModelVersion, Registry
from common.settings import Settings
from common.store import LocalStore
from producers.batch import Batch, read_batch, read_status
from producers.intake import Options, Rejected, submit, submit_bytes, validate
from producers.plan_file import InvalidReader, PlanReader

REGISTRY = Registry(
    {
        "tiny@1": ModelVersion(source="x", engine={"max_model_len": 2048}),
        "tiny@2": ModelVersion(source="x"),
        "other@1": ModelVersion(source="x"),
    },
    {"tiny": "1"},
    "tiny",
)


def chat(custom_id: str, text: str = "hi", **body: object) -> bytes:
    return json.dumps(
        {"custom_id": custom_id, "body": {"messages": [{"role": "user", "content": text}], **body}}
    ).encode()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def rows_of(store: LocalStore, batch: Batch) -> list[Row]:
    return [msgspec.msgpack.decode(r, type=Row) for r in PlanReader.of(store, batch).read(0, batch.planned)]


def test_a_file_becomes_a_batch(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([chat("b", "same"), b"", chat("a", "else"), chat("c", "same")]) + b"\n")
    batch = submit(str(path), store, Settings(), REGISTRY, Options(name="mine", metadata={"k": "v"}))

    assert read_batch(store, batch.id) == batch
    assert (batch.requests, batch.planned, batch.invalid, batch.model) == (3, 3, 0, "tiny@1")
    assert store.list("active/0") == [batch.id]
    assert store.list("incoming") == []
    assert read_status(store, batch).status == "queued"
    rows = rows_of(store, batch)
    assert [r.pos for r in rows] == [0, 1, 2]
    assert [r.custom_id for r in rows] == [b'"a"', b'"b"', b'"c"']
    assert sorted(r.index for r in rows) == [0, 1, 2]
    assert json.loads(rows[1].body) == {"messages": [{"role": "user", "content": "same"}]}


def test_a_bad_line_leaves_nothing_and_reports_everything(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([chat("a"), b"[1]", chat("a"), chat("d", stream=True)]))
    with pytest.raises(Rejected) as caught:
        submit(str(path), store, Settings(), REGISTRY, Options())
    report = caught.value.report
    assert [(e.line, e.field) for e in report.errors] == [(2, ""), (3, "custom_id"), (4, "body.stream")]
    assert report.report_file is not None
    with open(report.report_file) as file:
        assert [json.loads(line)["line"] for line in file] == [2, 3, 4]
    assert store.list("batches") == store.list("active/0") == store.list("incoming") == []
    assert validate(str(path), Settings(), REGISTRY, Options()).errors == report.errors


def test_skip_invalid_makes_error_lines(store: LocalStore) -> None:
    data = b"\n".join([b"[1]", chat("a"), chat("a"), chat("b", max_tokens=-1), chat("c")])
    batch = submit_bytes(data, store, Settings(), REGISTRY, Options(skip_invalid=True))
    assert (batch.requests, batch.planned, batch.invalid) == (5, 2, 3)
    assert sorted(r.index for r in rows_of(store, batch)) == [1, 4]
    found = [(index, json.loads(line)) for index, line in InvalidReader(store, batch)]
    assert [(n, line["custom_id"], line["error"]["code"]) for n, line in found] == [
        (0, None, "invalid_request"),
        (2, "a", "invalid_request"),
        (3, "b", "invalid_request"),
    ]


def test_the_same_key_gives_the_same_batch(store: LocalStore) -> None:
    options = Options(idempotency_key="k1")
    first = submit_bytes(chat("a"), store, Settings(), REGISTRY, options)
    assert submit_bytes(chat("b"), store, Settings(), REGISTRY, options) == first
    assert store.list("batches") == [first.id]


def test_what_is_no_file_is_one_line(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        submit(str(tmp_path / "none"), store, Settings(), REGISTRY, Options())
    with pytest.raises(UsageError, match="is a folder"):
        submit(str(tmp_path), store, Settings(), REGISTRY, Options())
