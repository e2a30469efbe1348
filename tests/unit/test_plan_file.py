"""What the plan's writer writes, the coordinator's reader reads."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import plan_reader
from common.errors import BatchmillError
from common.ids import new_batch_id
from common.messages import Row, decode_rows
from common.plan import Window
from common.plan_reader import PlanReader
from common.store import LocalStore
from producers.batch import Batch, Input
from producers.coordinator.batch_files import BatchFiles
from producers.invalid_file import InvalidWriter
from producers.plan_file import PlanWriter

row = st.tuples(
    st.binary(min_size=1, max_size=8), st.integers(0, 6), st.binary(max_size=300), st.integers(1, 2**32 - 1)
)
Given = tuple[bytes, int, bytes, int]


def make_batch(planned: int = 0, invalid: int = 0, windows: Sequence[Window] = ()) -> Batch:
    return Batch(
        id=new_batch_id(),
        model="m@1",
        created_at=0.0,
        shard=0,
        input=Input("x", 0, ""),
        requests=planned + invalid,
        planned=planned,
        invalid=invalid,
        cost=0,
        windows=list(windows),
    )


def write(store: LocalStore, folder: str, windows: Sequence[Sequence[Given]]) -> PlanWriter:
    with store.open_write(f"{folder}/rows") as rows, store.open_write(f"{folder}/plan") as plan:
        writer = PlanWriter(rows, plan)
        index = 0
        for window in windows:
            start = index
            index += len(window)
            writer.add([(start + n, 0, i, u, b, b, c, c // 2) for n, (i, u, b, c) in enumerate(window)], start, index)
    return writer


@given(st.lists(st.lists(row, max_size=12), max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_a_plan_comes_back_as_it_was(windows: list[list[Given]], data: st.DataObject) -> None:
    flat = [r for w in windows for r in w]
    batch = make_batch(len(flat))
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        writer = write(store, f"batches/{batch.id}", windows)
        assert writer.planned == len(flat)
        assert writer.cost == sum(cost for *_, cost in flat)
        if not flat:
            return
        files = BatchFiles(store, batch)
        rows = decode_rows(files.rows(np.arange(len(flat), dtype=np.uint32)))
        assert [r.pos for r in rows] == list(range(len(flat)))
        assert sorted(r.index for r in rows) == list(range(len(flat)))
        plan = files.plan(0, len(flat))
        assert plan["index"].tolist() == [r.index for r in rows]
        for r in rows:
            assert (r.custom_id, r.url, r.body, int(plan["cost"][r.pos])) == flat[r.index]
        # Positions and indexes of a window are those of its rows, whatever the order inside.
        for window in writer.windows:
            indexes = sorted(plan["index"][window.pos_start : window.pos_end].tolist())
            assert indexes == list(range(window.index_start, window.index_end))
        some = sorted(data.draw(st.sets(st.integers(0, len(flat) - 1), min_size=1)))
        assert decode_rows(files.rows(np.array(some, np.uint32))) == [rows[n] for n in some]


@pytest.mark.parametrize("at_once", [1, 5000, 1 << 30])
def test_a_window_written_again_gets_new_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(plan_reader, "_AT_ONCE", at_once)
    store = LocalStore(tmp_path)
    # Ten bodies that have a block, or nothing, in common with their neighbours.
    write(store, "old", [[(b'"%d"' % n, 3, b"%d" % (n % 10) * 64 + b"%d" % n, n + 1000) for n in range(5000)]])
    reader = PlanReader(store, "old", 5000)
    records = reader.plan(0, 5000)
    kept = [n for n, index in enumerate(records["index"].tolist()) if index % 3]
    rows = [decode_rows(b"\xdd\0\0\0\1" + r)[0] for r in reader.rows(records)]
    wanted = [decode_rows(b"\xdd\0\0\0\1" + r)[0] for r in reader.some_rows(records, kept)]
    assert wanted == [rows[n] for n in kept]
    batch = make_batch(len(kept))
    with store.open_write(f"batches/{batch.id}/rows") as file, store.open_write(f"batches/{batch.id}/plan") as plan:
        writer = PlanWriter(file, plan)
        writer.copy(iter(wanted), records, kept, 0, 5000)
    assert writer.windows == [Window(0, len(kept), 0, 5000)]
    again = decode_rows(BatchFiles(store, batch).rows(np.arange(len(kept), dtype=np.uint32)))
    assert again == [Row(pos, rows[n].index, *_tail(rows[n])) for pos, n in enumerate(kept)]
    assert writer.cost == sum(r.index + 1000 for r in again)
    shared = BatchFiles(store, batch).plan(0, len(kept))["shared"].tolist()
    assert shared[1:] == [64 if a.body[:64] == b.body[:64] else 0 for a, b in pairwise(again)]
    assert 64 in shared
    assert 0 in shared[1:]


def _tail(r: Row) -> tuple[bytes, int, bytes]:
    return r.custom_id, r.url, r.body


def test_windows_cover_all_indexes_even_without_rows(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with store.open_write("rows") as rows, store.open_write("plan") as plan:
        writer = PlanWriter(rows, plan)
        writer.add([], 0, 5)
        writer.add([(7, 8, b'"a"', 0, b"{}", b"", 1, 0)], 5, 9)
        writer.add([], 9, 12)
        writer.add([], 12, 12)
    assert writer.windows == [Window(0, 0, 0, 5), Window(0, 1, 5, 9), Window(1, 1, 9, 12)]


def test_a_file_that_is_too_short_is_said_to_be(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write(store, "b", [[(b'"%d"' % n, 0, b"{}", 1) for n in range(5)]])
    reader = PlanReader(store, "b", 5)
    records = reader.plan(0, 5)
    (tmp_path / "b/rows").write_bytes((tmp_path / "b/rows").read_bytes()[:-1])
    with pytest.raises(BatchmillError, match="b/rows is damaged"):
        reader.rows(records)
    assert len(reader.rows(records[:4])) == 4
    (tmp_path / "b/plan").write_bytes((tmp_path / "b/plan").read_bytes()[:-1])
    with pytest.raises(BatchmillError, match="b/plan is damaged"):
        reader.plan(0, 5)
    with pytest.raises(ValueError, match="positions"):
        reader.plan(0, 6)
    assert reader.rows(reader.plan(2, 2)) == []


def test_invalid_lines_come_back_in_order(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    batch = make_batch(0, 3000)
    folder = f"batches/{batch.id}"
    with store.open_write(f"{folder}/invalid") as lines, store.open_write(f"{folder}/invalid.idx") as index:
        writer = InvalidWriter(lines, index, batch.id, "m@1")
        for n in range(3000):
            writer.add(3 * n, None if n % 2 else b'"id-%d"' % n, f"line {n}: no \u2028 good")
        writer.flush()
    assert writer.count == 3000
    found = list(BatchFiles(store, batch).invalid())
    assert [n for n, _ in found] == [3 * n for n in range(3000)]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for _, line in found)
    decoded = [json.loads(line) for _, line in found]
    assert [d["custom_id"] for d in decoded[:3]] == ["id-0", None, "id-2"]
    assert decoded[2]["error"] == {"code": "invalid_request", "message": "line 2: no \u2028 good"}
    assert decoded[2]["response"] is None
