"""What is done for every request or every batch stays cheap: counted in objects and calls, not in seconds."""

from __future__ import annotations

import gc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.messages import Row
from common.store import LocalStore
from producers.coordinator.batch_files import BatchFiles
from tests.support.coordinators import make_batch
from workers.attempt import Tried
from workers.engine.echo_bodies import Bodies
from workers.outcome import judge
from workers.results import Done


def test_a_request_in_a_worker_makes_nothing_that_the_collector_follows() -> None:
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9})
    answer = Bodies("m@1").answer("/v1/chat/completions", body)
    outcome = judge(0, answer.status, answer.body)
    row = Row(0, 0, b'"a"', 0, body)
    tried = Tried(answer.status, answer.body, outcome)
    for made in (row, answer, outcome, tried, Done(0, row, tried)):
        assert not gc.is_tracked(made), type(made)


def test_rows_that_were_sized_up_are_read_with_one_more_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    files = BatchFiles(store, make_batch(store, 40))
    asked: list[str] = []
    read = LocalStore.read_range

    def counted(store: LocalStore, path: str, start: int, length: int) -> bytes:
        asked.append(path.rpartition("/")[2])
        return read(store, path, start, length)

    monkeypatch.setattr(LocalStore, "read_range", counted)
    positions = np.arange(8, 24, dtype=np.uint32)
    files.row_sizes(positions)
    files.rows(positions)
    assert asked == ["plan", "rows"]
