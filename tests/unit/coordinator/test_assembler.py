"""Assembly against a naive model: order, merging, what is made for rows without an answer, the same bytes twice."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.messages import VERSION, Kind, Part, Results, Row, decode_rows, encode
from common.store import LocalStore
from producers.batch import Batch, folder
from producers.coordinator import position_table
from producers.coordinator.assembler import Assembled, Assembler, MissingRows, Source, Stopped
from producers.coordinator.batch_files import BatchFiles, DamagedBatch
from producers.coordinator.ledger import Ledger, Reader
from producers.coordinator.records import Exhausted, Type, pack_positions
from producers.coordinator.records import encode as encode_record
from producers.coordinator.result_records import ResultRecords
from tests.support.coordinators import failed_line, line_of, make_batch, part_of


class Written:
    """A batch, its ledger, and what assembly makes of them."""

    def __init__(self, folder: Path, requests: int, invalid: list[int], window: int) -> None:
        self.store = LocalStore(folder / "store")
        self.batch = make_batch(self.store, requests, invalid=invalid, window=window)
        self.files = BatchFiles(self.store, self.batch)
        self.ledger = Ledger(folder / "wal", 1, segment_bytes=4000)
        self.places: list[int] = []
        every = np.arange(self.batch.planned, dtype=np.uint32)
        self.rows = decode_rows(self.files.rows(every)) if self.batch.planned else []

    def results(self, rows: list[tuple[int, Kind, bytes]], beside: list[Part] | None = None) -> None:
        parts = [*(beside or []), part_of(self.batch.id, rows)]
        payload = encode(Results(VERSION, "chunk", self.batch.model, "node", 0, False, parts))
        self.places.append(self.ledger.append(Type.RESULTS, payload, [self.batch.id]))

    def exhausted(self, positions: list[int], *, use_line: bool) -> None:
        packed = pack_positions(np.array(positions, dtype=np.uint32))
        decision = Exhausted(self.batch.id, packed, use_line, "engine_crash", "it ended", 4)
        self.places.append(self.ledger.append(Type.DECISION, encode_record(decision), [self.batch.id]))

    def assemble(self, cut: str | None = None, *, partial: bool = False) -> tuple[bytes, bytes, Assembled]:
        reader = Reader(self.ledger)
        output, errors = io.BytesIO(), io.BytesIO()
        try:
            given = Source(self.batch, self.places, cut, partial)
            told = Assembler(given, ResultRecords(reader, 1 << 16), self.files, self.ledger.folder).write(
                output, errors
            )
        finally:
            reader.close()
        return output.getvalue(), errors.getvalue(), told


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[int], int, list[tuple[str, list[tuple[int, int]]]]]:
    requests = draw(st.integers(1, 40))
    invalid = draw(st.lists(st.integers(0, requests - 1), unique=True, max_size=10))
    window = draw(st.sampled_from([1, 3, 7, 50]))
    planned = requests - len(invalid)
    if not planned:
        return requests, invalid, window, []
    row = st.tuples(st.integers(0, planned - 1), st.sampled_from([1, 2, 3]))
    step = st.tuples(st.sampled_from(["results", "line", "made"]), st.lists(row, max_size=10))
    return requests, invalid, window, draw(st.lists(step, max_size=12))


@given(histories())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_assembly_agrees_with_a_naive_model(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[int, list[int], int, list[tuple[str, list[tuple[int, int]]]]],
) -> None:
    requests, invalid, window, steps = case
    it = Written(tmp_path_factory.mktemp("batch"), requests, invalid, window)
    good: dict[int, bytes] = {}
    bad: dict[int, bytes | None] = {}
    attempts: dict[int, bytes] = {}
    number = 0
    for kind, rows in steps:
        if kind == "results":
            message = []
            for pos, what in rows:
                number += 1
                row = it.rows[pos]
                line = line_of(it.batch.id, row, number) if what == 1 else failed_line(it.batch.id, row, 400 + number)
                message.append((pos, Kind(what), line))
                if what == Kind.OUTPUT:
                    good.setdefault(row.index, line)
                elif what == Kind.ERROR and bad.get(row.index) is None and row.index not in bad:
                    bad[row.index] = line
                elif what == Kind.RETRY and row.index not in bad:
                    attempts[row.index] = line
            it.results(message)
        else:
            positions = sorted({pos for pos, _ in rows})
            if positions:
                it.exhausted(positions, use_line=kind == "line")
            for pos in positions:
                index = it.rows[pos].index
                if index not in bad and index not in good:
                    bad[index] = attempts.get(index) if kind == "line" else None
    output, errors, told = it.assemble(cut="cancelled")
    assert output == b"".join(good[i] for i in sorted(good))
    lines = errors.splitlines(keepends=True)
    wanted = [i for i in range(requests) if i not in good]
    assert len(lines) == len(wanted)
    for index, line in zip(wanted, lines, strict=True):
        decoded = msgspec.json.decode(line)
        assert decoded["custom_id"] == f"r{index}"
        if index in invalid:
            assert decoded["error"]["code"] == "invalid_request"
        elif index not in bad:
            assert decoded["error"]["code"] == "batch_cancelled"
        elif bad[index] is None:
            assert decoded["error"] == {"code": "engine_crash", "message": "it ended"}
            assert decoded["batchmill"]["attempts"] == 4
        else:
            assert line == bad[index]
    assert (told.completed, told.failed) == (len(good), len(wanted))
    assert it.assemble(cut="cancelled")[:2] == (output, errors)
    missing = sorted(row.pos for row in it.rows if row.index not in good and row.index not in bad)
    if missing:
        with pytest.raises(MissingRows) as found:
            it.assemble()
        assert found.value.positions.tolist() == missing
    else:
        assert it.assemble()[:2] == (output, errors)
    part = it.assemble(partial=True)
    assert part[0] == output
    assert [msgspec.json.decode(x)["custom_id"] for x in part[1].splitlines()] == [
        f"r{i}" for i in wanted if i in bad or i in invalid
    ]


def test_many_windows_spill_to_a_file_that_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Written(tmp_path, 400, [5, 6, 399], 10)
    rng = np.random.default_rng(1)
    for some in np.array_split(rng.permutation(it.batch.planned), 30):
        it.results([(int(p), Kind.OUTPUT, line_of(it.batch.id, it.rows[int(p)])) for p in some])
    saved: list[int] = []
    real = position_table.PositionTable._save

    def save(table: position_table.PositionTable, number: int, entries: npt.NDArray[np.void]) -> None:
        saved.append(number)
        real(table, number, entries)

    monkeypatch.setattr(position_table.PositionTable, "_save", save)
    output, errors, _ = it.assemble()
    assert len(saved) > 100
    assert [msgspec.json.decode(x)["custom_id"] for x in output.splitlines()] == [
        f"r{i}" for i in range(400) if i not in (5, 6, 399)
    ]
    assert len(errors.splitlines()) == 3
    assert [p.name for p in it.ledger.folder.iterdir() if "assembly" in p.name] == []


def test_lines_larger_than_a_stretch(tmp_path: Path) -> None:
    it = Written(tmp_path, 12, [], 12)
    lines = {}
    for row in it.rows:
        lines[row.index] = b'{"n":%d,"x":"%b"}\n' % (row.index, b"x" * (2 << 20))
        it.results([(row.pos, Kind.OUTPUT, lines[row.index])])
    output, errors, told = it.assemble()
    assert output == b"".join(lines[i] for i in range(12))
    assert errors == b""
    assert told.output_bytes == len(output)


def test_parts_of_other_batches_in_one_record_are_left_alone(tmp_path: Path) -> None:
    it = Written(tmp_path, 3, [], 3)
    other = part_of("batch_other", [(0, Kind.OUTPUT, b"{}\n"), (1, Kind.OUTPUT, b"{}\n")])
    outside = part_of(it.batch.id, [(3, Kind.OUTPUT, b"{}\n"), (0, Kind.OUTPUT, b"{}\n")])
    it.results([(r.pos, Kind.OUTPUT, line_of(it.batch.id, r)) for r in it.rows], beside=[other, outside])
    output, _, _ = it.assemble()
    assert output == b"".join(line_of(it.batch.id, r) for r in sorted(it.rows, key=lambda r: r.index))


def test_a_damaged_record_means_missing_rows(tmp_path: Path) -> None:
    it = Written(tmp_path, 4, [], 4)
    for row in it.rows:
        it.results([(row.pos, Kind.OUTPUT, line_of(it.batch.id, row))])
    path = it.ledger.path_of(0)
    data = bytearray(path.read_bytes())
    at = data.index(line_of(it.batch.id, it.rows[2]))
    data[at + 5] ^= 4
    path.write_bytes(bytes(data))
    with pytest.raises(MissingRows) as found:
        it.assemble()
    assert found.value.positions.tolist() == [2]


def test_damaged_files_of_the_batch_are_told_by_name(tmp_path: Path) -> None:
    it = Written(tmp_path, 4, [], 4)
    it.results([(r.pos, Kind.OUTPUT, line_of(it.batch.id, r)) for r in it.rows])
    it.store.put_atomic(f"{folder(it.batch.id)}/plan", b"short")
    with pytest.raises(DamagedBatch, match=r"batches/batch_\w+/plan"):
        it.assemble()


def test_stopping_leaves_nothing(tmp_path: Path) -> None:
    it = Written(tmp_path, 4, [], 4)
    it.results([(r.pos, Kind.OUTPUT, line_of(it.batch.id, r)) for r in it.rows])
    reader = Reader(it.ledger)
    source = Source(it.batch, it.places, cut=None, stop=lambda: True)
    with pytest.raises(Stopped), it.store.group(lambda: None) as group:
        Assembler(source, ResultRecords(reader), it.files, it.ledger.folder).to_group(group)
    reader.close()
    assert not it.store.exists(f"{folder(it.batch.id)}/output.jsonl")
    assert it.store.list(folder(it.batch.id)) == ["batch.json", "plan", "rows"]


def test_only_invalid_requests(tmp_path: Path) -> None:
    it = Written(tmp_path, 3, [0, 1, 2], 3)
    output, errors, told = it.assemble()
    assert output == b""
    assert len(errors.splitlines()) == told.failed == 3


@pytest.fixture
def batch_files(tmp_path: Path) -> tuple[LocalStore, Batch, BatchFiles]:
    store = LocalStore(tmp_path)
    batch = make_batch(store, 50)
    return store, batch, BatchFiles(store, batch)


def test_rows_are_read_in_one_go_and_checked(batch_files: tuple[LocalStore, Batch, BatchFiles]) -> None:
    store, batch, files = batch_files
    some = np.array([3, 4, 9], dtype=np.uint32)
    rows = decode_rows(files.rows(some))
    assert [r.pos for r in rows] == [3, 4, 9]
    sizes, costs = files.row_sizes(some)
    assert sizes.tolist() == [len(msgspec.msgpack.encode(r)) for r in rows]
    assert costs.tolist() == [100] * len(rows)
    assert [r.pos for r in files.each_row(np.arange(50, dtype=np.uint32), most_bytes=40)] == list(range(50))
    raw = bytearray(store.read(f"{folder(batch.id)}/rows"))
    raw[0] ^= 0xFF
    store.put_atomic(f"{folder(batch.id)}/rows", bytes(raw))
    with pytest.raises(DamagedBatch, match="/rows"):
        files.rows(np.array([0, 1], dtype=np.uint32))
    assert len(decode_rows(files.rows(some))) == 3
    # Another batch's rows, whole but wrong.
    raw = bytearray(b"".join(msgspec.msgpack.encode(Row(7, 0, b'"x"', 0, b"{}")) for _ in range(50)))
    store.put_atomic(f"{folder(batch.id)}/rows", bytes(raw.ljust(4000, b"\0")))
    with pytest.raises(DamagedBatch, match="/rows"):
        files.rows(some)
    store.delete(f"{folder(batch.id)}/rows")
    with pytest.raises(DamagedBatch, match="rows: is missing"):
        files.rows(some)
