"""What the plan's writer writes, its reader reads."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BatchmillError
from common.ids import new_batch_id
from common.messages import Row, decode_rows, join_rows
from common.store import LocalStore
from producers.batch import Batch, Input
from producers.plan_file import InvalidReader, InvalidWriter, PlanReader, PlanWriter, WindowRows

row = st.tuples(
    st.binary(min_size=1, max_size=8), st.integers(0, 6), st.binary(max_size=300), st.integers(1, 2**32 - 1)
)


def write(store: LocalStore, windows: list[list[tuple[bytes, int, bytes, int]]]) -> PlanWriter:
    with store.open_write("b/rows") as rows, store.open_write("b/plan") as plan:
        writer = PlanWriter(rows, plan)
        index = 0
        for window in windows:
            columns = WindowRows()
            start = index
            for custom_id, url, body, cost in window:
                columns.append(index, custom_id, url, body, body, cost)
                index += 1
            writer.add(columns, start, index)
    return writer


@given(st.lists(st.lists(row, max_size=12), max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_a_plan_comes_back_as_it_was(windows: list[list[tuple[bytes, int, bytes, int]]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        writer = write(store, windows)
        flat = [r for w in windows for r in w]
        assert writer.planned == len(flat)
        assert writer.cost == sum(cost for *_, cost in flat)
        reader = PlanReader(store, "b", writer.planned, writer.windows)
        rows = decode_rows(join_rows(reader.read(0, len(flat))))
        assert [r.pos for r in rows] == list(range(len(flat)))
        assert sorted(r.index for r in rows) == list(range(len(flat)))
        for r in rows:
            custom_id, url, body, cost = flat[r.index]
            assert (r.custom_id, r.url, r.body) == (custom_id, url, body)
            assert int(reader.plan(r.pos, r.pos + 1)["cost"][0]) == cost
            window = reader.window_of(r.pos)
            assert window.pos_start <= r.pos < window.pos_end
            assert window.index_start <= r.index < window.index_end
        # Any stretch, and any subset of it.
        start = data.draw(st.integers(0, len(flat)))
        end = data.draw(st.integers(start, len(flat)))
        wanted = np.array(data.draw(st.lists(st.booleans(), min_size=end - start, max_size=end - start)), np.bool_)
        assert decode_rows(join_rows(reader.read(start, end))) == rows[start:end]
        kept = [r for r, w in zip(rows[start:end], wanted, strict=True) if w]
        assert decode_rows(join_rows(reader.read(start, end, wanted))) == kept
        assert reader.indexes(start, end).tolist() == [r.index for r in rows[start:end]]


def test_windows_without_rows_belong_to_no_position(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with store.open_write("b/rows") as rows, store.open_write("b/plan") as plan:
        writer = PlanWriter(rows, plan)
        columns = WindowRows()
        writer.add(columns, 0, 5)
        columns.append(7, b'"a"', 0, b"{}", b"", 1)
        writer.add(columns, 5, 9)
        columns.clear()
        writer.add(columns, 9, 12)
    reader = PlanReader(store, "b", 1, writer.windows)
    assert [(w.pos_start, w.pos_end, w.index_start, w.index_end) for w in writer.windows] == [
        (0, 0, 0, 5),
        (0, 1, 5, 9),
        (1, 1, 9, 12),
    ]
    assert reader.window_of(0) == writer.windows[1]
    with pytest.raises(ValueError, match="position 1 of 1"):
        reader.window_of(1)


def test_a_slice_is_one_read_of_each_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    writer = write(store, [[(b'"%d"' % n, 0, b"{}", 1) for n in range(500)]])
    reads: list[str] = []

    class Counting(LocalStore):
        def read_range(self, path: str, start: int, length: int) -> bytes:
            reads.append(path)
            return super().read_range(path, start, length)

    assert len(PlanReader(Counting(tmp_path), "b", writer.planned, writer.windows).read(100, 400)) == 300
    assert reads == ["b/plan", "b/rows"]


def test_a_file_that_is_too_short_is_said_to_be(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    writer = write(store, [[(b'"%d"' % n, 0, b"{}", 1) for n in range(5)]])
    reader = PlanReader(store, "b", writer.planned, writer.windows)
    (tmp_path / "b/rows").write_bytes((tmp_path / "b/rows").read_bytes()[:-1])
    with pytest.raises(BatchmillError, match="b/rows is damaged"):
        reader.read(0, 5)
    (tmp_path / "b/plan").write_bytes((tmp_path / "b/plan").read_bytes()[:-1])
    with pytest.raises(BatchmillError, match="b/plan is damaged"):
        reader.read(0, 5)
    with pytest.raises(ValueError, match="positions"):
        reader.plan(0, 6)


def test_invalid_lines_come_back_in_order(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    batch = Batch(
        id=new_batch_id(),
        model="m@1",
        created_at=0.0,
        shard=0,
        input=Input("x", 0, ""),
        requests=9000,
        planned=0,
        invalid=3000,
        cost=0,
        windows=[],
    )
    folder = f"batches/{batch.id}"
    with store.open_write(f"{folder}/invalid") as lines, store.open_write(f"{folder}/invalid.idx") as index:
        writer = InvalidWriter(lines, index, batch.id, "m@1")
        for n in range(3000):
            writer.add(3 * n, None if n % 2 else b'"id-%d"' % n, f"line {n}: no \u2028 good")
        writer.flush()
    assert writer.count == 3000
    found = list(InvalidReader(store, batch))
    assert [n for n, _ in found] == [3 * n for n in range(3000)]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for _, line in found)
    decoded = [json.loads(line) for _, line in found]
    assert [d["custom_id"] for d in decoded[:3]] == ["id-0", None, "id-2"]
    assert decoded[2]["error"] == {"code": "invalid_request", "message": "line 2: no \u2028 good"}
    assert decoded[2]["response"] is None
    part = InvalidReader(store, batch)
    assert part.lines(part.records(10, 12)) == [found[10][1], found[11][1]]


def test_rows_are_what_workers_decode(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    writer = write(store, [[(b'"a"', 3, b'{"x":1}', 7)]])
    (raw,) = PlanReader(store, "b", 1, writer.windows).read(0, 1)
    assert msgspec.msgpack.decode(raw, type=Row) == Row(0, 0, b'"a"', 3, b'{"x":1}')
