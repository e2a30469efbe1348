"""Retries: a new batch of what one left unanswered, and the outputs of both as one."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BatchmillError, UsageError
from common.ids import new_batch_id
from common.lines import answer_line, encode_marks, error_line
from common.messages import Row
from common.registry import ModelVersion, Registry
from common.settings import Settings
from common.store import LocalStore
from producers import merged
from producers.batch import Batch, folder, read_batch, read_status
from producers.coordinator.batch_files import BatchFiles
from producers.intake import Options, submit_bytes
from producers.intake.again import submit_again
from tests.support import stored

REGISTRY = Registry({"tiny@1": ModelVersion(source="x")}, {}, "tiny@1")
MARKS = encode_marks("tiny@1")


def submit(store: LocalStore, requests: int, invalid: Set[int] = frozenset()) -> Batch:
    """Requests `c<n>`; prompts run backwards, so that the planned order is another. Invalid ones repeat an id."""
    valid = b'{"custom_id":"c%d","body":{"prompt":"%06d"}}\n'
    raw = b"".join(b'{"custom_id":"c0"}\n' if n in invalid else valid % (n, requests - n) for n in range(requests))
    options = Options(
        skip_invalid=bool(invalid), metadata={"k": "v"}, tenant="lab", completion_window="1h", cache="read"
    )
    return submit_bytes(raw, store, Settings(), REGISTRY, options)


def rows(store: LocalStore, batch: Batch) -> list[Row]:
    files = BatchFiles(store, batch)
    return list(files.each_row(np.arange(batch.planned, dtype=np.uint32)))


def answer(store: LocalStore, batch: Batch, failed: set[str], invalid: list[int] | None = None) -> None:
    """The outputs that the coordinator would have made; answers tell which batch gave them."""
    good, bad = [], [(n, error_line(batch.id, n, b'"c0"', "invalid_request", "x", MARKS)) for n in invalid or []]
    for row in rows(store, batch):
        if json.loads(row.custom_id) in failed:
            bad.append((row.index, error_line(batch.id, row.index, row.custom_id, "batch_expired", "x", MARKS)))
        else:
            body = b'"%b"' % batch.id.encode()
            good.append((row.index, answer_line(batch.id, row.index, row.custom_id, 200, body, MARKS)))
    output, errors = (b"".join(line for _, line in sorted(lines)) for lines in (good, bad))
    stored.put_outputs(store, batch.id, output, errors)


def told(store: LocalStore, batch: Batch) -> list[tuple[str, str | None]]:
    """Custom id and which batch answered, of all merged lines."""
    found = []
    for line in merged.lines(store, batch.id):
        shown = json.loads(line.data)
        assert line.good == (shown["error"] is None)
        found.append((shown["custom_id"], shown["response"] and shown["response"]["body"]))
    return found


@settings(max_examples=25, deadline=None)
@given(
    requests=st.integers(1, 40),
    invalid=st.sets(st.integers(1, 39), max_size=5),
    first=st.sets(st.integers(0, 39)),
    second=st.sets(st.integers(0, 39)),
)
def test_retries_hold_what_is_unanswered_and_merge_in_the_order_of_the_input(
    tmp_path_factory: pytest.TempPathFactory, requests: int, invalid: set[int], first: set[int], second: set[int]
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("store"))
    refused = {n for n in invalid if n < requests}
    batch = submit(store, requests, refused)
    valid = [n for n in range(requests) if n not in refused]
    failing = [n for n in valid if n in first]
    answer(store, batch, {f"c{n}" for n in failing}, sorted(refused))
    if not failing:
        with pytest.raises(UsageError, match="nothing to retry"):
            submit_again(store, Settings(), batch, Options())
        assert store.list("incoming") == []
        return
    again = submit_again(store, Settings(), batch, Options())
    made = rows(store, again)
    # Renumbered without gaps, in the order of the input, whatever the planned order is.
    assert sorted(row.index for row in made) == list(range(len(failing)))
    by_index = sorted(made, key=lambda r: r.index)
    assert [json.loads(row.custom_id) for row in by_index] == [f"c{n}" for n in failing]
    assert [json.loads(row.body)["prompt"] for row in by_index] == [f"{requests - n:06}" for n in failing]
    assert again.retry_of == batch.id
    assert (again.requests, again.tenant, again.metadata, again.expires_at) == (len(failing), "lab", {"k": "v"}, None)
    assert again.cache == "read", "as it was, whatever the settings say by now"
    assert read_status(store, again).status == "queued"
    failing_again = [n for n in failing if n in second]
    answer(store, again, {f"c{n}" for n in failing_again})
    last = again
    if failing_again:
        last = submit_again(store, Settings(), again, Options(priority="high"))
        assert last.priority == "high"
        answer(store, last, set())

    def by(n: int) -> str | None:
        if n in refused:
            return None
        return batch.id if n not in failing else again.id if n not in failing_again else last.id

    assert told(store, last) == [("c0" if n in refused else f"c{n}", by(n)) for n in range(requests)]


def test_a_retry_is_made_once_unless_another_key_says_otherwise(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    batch = submit(store, 5)
    answer(store, batch, {"c1"})
    again = submit_again(store, Settings(), batch, Options())
    assert submit_again(store, Settings(), batch, Options()).id == again.id
    assert submit_again(store, Settings(), batch, Options(idempotency_key="another")).id != again.id


def test_windows_without_a_failure_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.intake.reading.WINDOW_ROWS", 1000)
    store = LocalStore(tmp_path)
    batch = submit(store, 3000)
    assert len(batch.windows) == 3
    answer(store, batch, {"c5", "c7", "c2001"})
    again = submit_again(store, Settings(), batch, Options())
    assert [(w.pos_start, w.pos_end, w.index_start, w.index_end) for w in again.windows] == [(0, 2, 0, 2), (2, 3, 2, 3)]


def test_merged_outputs_are_files_with_a_summary(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    batch = submit(store, 10)
    answer(store, batch, {"c1", "c2", "c3"})
    again = submit_again(store, Settings(), batch, Options())
    answer(store, again, {"c2"})
    put, summary = merged.deliver(store, again.id, tmp_path / "out")
    assert (summary.completed, summary.failed, summary.merged) == (9, 1, [batch.id, again.id])
    output = [json.loads(line)["custom_id"] for line in Path(put.output).read_bytes().splitlines()]
    assert output == [f"c{n}" for n in range(10) if n != 2]
    assert msgspec.json.decode(Path(put.summary or "").read_bytes())["output"]["lines"] == 9
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["errors.jsonl", "output.jsonl", "summary.json"]


def test_outputs_that_do_not_fit_are_not_merged(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    batch, other = submit(store, 4), submit(store, 4)
    answer(store, batch, {"c1"})
    again = submit_again(store, Settings(), batch, Options())
    answer(store, again, set())
    answer(store, batch, {"c2"})
    with pytest.raises(BatchmillError, match="are not those of what"):
        list(merged.lines(store, again.id))
    with pytest.raises(UsageError, match="retries no other"):
        list(merged.lines(store, other.id))
    gone = msgspec.structs.replace(read_batch(store, again.id), retry_of=new_batch_id())
    store.put_atomic(f"{folder(again.id)}/batch.json", msgspec.json.encode(gone))
    with pytest.raises(UsageError, match="no batch"):
        list(merged.lines(store, again.id))
