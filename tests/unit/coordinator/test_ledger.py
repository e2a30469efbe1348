"""The write-ahead log: what was appended comes back, whatever a crash or a bad disk left of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producers.coordinator import segments
from producers.coordinator.ledger import DiskFull, Ledger, Reader
from producers.coordinator.records import Type
from producers.coordinator.segments import FRAME, HEADER, Damage, Record

PAYLOADS = st.lists(st.tuples(st.sampled_from(list(Type)), st.binary(max_size=60)), min_size=1, max_size=6)
#: hypothesis and a folder of the test: each example makes a folder of its own in it.
COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_segment(path: Path, payloads: list[tuple[Type, bytes]]) -> tuple[bytes, list[int]]:
    """A segment's bytes, and where its records end."""
    header, seed = segments.new_header()
    data, ends = header, []
    for kind, payload in payloads:
        data += segments.frame(seed, kind, payload) + payload
        ends.append(len(data))
    path.write_bytes(data)
    return data, ends


def scanned(path: Path, data: bytes) -> list[Record | Damage]:
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return list(segments.scan(fd, len(data)))
    finally:
        os.close(fd)


@given(PAYLOADS)
@COMMON
def test_every_truncation_keeps_all_records_before_it(tmp_path: Path, payloads: list[tuple[Type, bytes]]) -> None:
    path = tmp_path / "segment"
    data, ends = write_segment(path, payloads)
    for length in range(len(data) + 1):
        items = scanned(path, data[:length])
        records = [i for i in items if isinstance(i, Record)]
        whole = sum(1 for end in ends if end <= length)
        assert [(r.type, r.payload) for r in records] == payloads[:whole]
        damage = [i for i in items if isinstance(i, Damage)]
        assert all(d.torn for d in damage)
        clean = length in (0, HEADER, *ends)
        assert bool(damage) == (not clean)


@given(PAYLOADS, st.data())
@COMMON
def test_a_flipped_bit_costs_one_record_and_is_noticed(
    tmp_path: Path, payloads: list[tuple[Type, bytes]], data: st.DataObject
) -> None:
    path = tmp_path / "segment"
    good, ends = write_segment(path, payloads)
    where = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[where // 8] ^= 1 << (where % 8)
    items = scanned(path, bytes(bad))
    records = [(i.type, i.payload) for i in items if isinstance(i, Record)]
    if where // 8 < HEADER:
        assert records == payloads  # The header says everything three times.
        return
    hit = next(n for n, end in enumerate(ends) if where // 8 < end)
    assert records == payloads[:hit] + payloads[hit + 1 :]
    assert [i.torn for i in items if isinstance(i, Damage)] == [hit == len(payloads) - 1]


def test_a_payload_that_looks_like_a_record_is_not_taken_for_one(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    other = segments.new_header()[1]
    forged = segments.frame(other, Type.DECISION, b"forged") + b"forged"
    data, ends = write_segment(path, [(Type.RESULTS, forged), (Type.RESULTS, b"after")])
    bad = bytearray(data)
    bad[HEADER + FRAME - 1] ^= 1  # The first record's CRC.
    items = scanned(path, bytes(bad))
    assert [i.payload for i in items if isinstance(i, Record)] == [b"after"]
    assert ends[-1] == len(data)


def test_a_large_damaged_stretch_is_searched_across_blocks(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    payloads = [(Type.RESULTS, os.urandom(5 << 20)), (Type.RESULTS, b"small"), (Type.DISPATCH, b"last")]
    data, _ = write_segment(path, payloads)
    bad = bytearray(data)
    bad[HEADER + 8 + 1] ^= 0x80  # The first record's length.
    records = [i for i in scanned(path, bytes(bad)) if isinstance(i, Record)]
    assert [(r.type, r.payload) for r in records] == payloads[1:]


def records_of(ledger: Ledger) -> list[bytes]:
    found = []
    for item in ledger.recover():
        assert isinstance(item, tuple)
        if not isinstance(item, Damage):
            place, record = item
            found.append(record.payload)
            ledger.hold(place, "batch")
    ledger.seal_past()
    return found


def test_a_later_leader_reads_what_was_appended(tmp_path: Path) -> None:
    first = Ledger(tmp_path, 1, segment_bytes=400)
    payloads = [b"%03d" % n * 20 for n in range(30)]
    for payload in payloads:
        first.append(Type.RESULTS, payload, ["batch"])
    assert first.segment_count > 3
    first.close()
    second = Ledger(tmp_path, 2, segment_bytes=400)
    assert records_of(second) == payloads
    second.append(Type.RESULTS, b"more", ["batch"])
    second.close()
    assert records_of(Ledger(tmp_path, 3)) == [*payloads, b"more"]


def test_what_an_ousted_leader_appends_after_the_seal_does_not_count(tmp_path: Path) -> None:
    old = Ledger(tmp_path, 1)
    old.append(Type.RESULTS, b"before", ["batch"])
    new = Ledger(tmp_path, 2)
    assert records_of(new) == [b"before"]
    old.append(Type.RESULTS, b"after", ["batch"])
    new.append(Type.RESULTS, b"new", ["batch"])
    new.close()
    third = Ledger(tmp_path, 3)
    assert records_of(third) == [b"before", b"new"]
    # An epoch number is used once, and so is a segment's name.
    with pytest.raises(Exception, match="File exists"):
        Ledger(tmp_path, 1).append(Type.RESULTS, b"again")


def test_a_torn_record_at_the_end_is_cut(tmp_path: Path) -> None:
    first = Ledger(tmp_path, 1)
    first.append(Type.RESULTS, b"whole", ["batch"])
    first.append(Type.RESULTS, b"torn", ["batch"])
    first.close()
    path = next(p for p in tmp_path.iterdir() if segments.parse_name(p.name))
    os.truncate(path, path.stat().st_size - 2)
    second = Ledger(tmp_path, 2)
    items = list(second.recover())
    assert [i[1].payload for i in items if not isinstance(i, Damage)] == [b"whole"]
    assert [i.torn for i in items if isinstance(i, Damage)] == [True]


def test_segments_go_when_no_batch_needs_them(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 1, segment_bytes=300)
    for n in range(12):
        ledger.append(Type.RESULTS, b"x" * 90, ["a" if n < 6 else "b"])
    assert ledger.segment_count == 6
    ledger.release(["a"])
    assert ledger.segment_count == 3
    ledger.release(["b"])
    assert ledger.segment_count == 1  # The current one.
    ledger.sync()
    ledger.close()
    later = Ledger(tmp_path, 2)
    for _ in later.recover():
        pass
    later.seal_past()
    assert later.segment_count == 0
    assert [p.name for p in tmp_path.iterdir()] == ["00000002.manifest"]


def test_a_segment_that_an_ousted_leader_begins_does_not_count(tmp_path: Path) -> None:
    old = Ledger(tmp_path, 1, segment_bytes=100)
    old.append(Type.RESULTS, b"before", ["batch"])
    new = Ledger(tmp_path, 2)
    assert records_of(new) == [b"before"]
    new.append(Type.RESULTS, b"new", ["batch"])
    for _ in range(3):
        old.append(Type.RESULTS, b"late" * 20, ["batch"])
    new.close()
    assert records_of(Ledger(tmp_path, 3)) == [b"before", b"new"]
    assert records_of(Ledger(tmp_path, 4)) == [b"before", b"new"]


@pytest.mark.parametrize("kind", [".seal", ".manifest"])
def test_a_damaged_seal_or_manifest_costs_no_record(tmp_path: Path, kind: str) -> None:
    first = Ledger(tmp_path, 1)
    first.append(Type.RESULTS, b"one", ["batch"])
    first.close()
    second = Ledger(tmp_path, 2)
    assert records_of(second) == [b"one"]
    second.append(Type.RESULTS, b"two", ["batch"])
    second.close()
    (path,) = (p for p in tmp_path.iterdir() if p.name.endswith(kind))
    good = path.read_bytes()
    for epoch, bit in enumerate(range(0, len(good) * 8, 5), 3):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(bad)
        assert records_of(Ledger(tmp_path, epoch)) == [b"one", b"two"]


def test_records_of_a_lost_segment_are_not_there(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 1, segment_bytes=100)
    places = [ledger.append(Type.RESULTS, b"%d" % n * 50, ["batch"]) for n in range(4)]
    ledger.path_of(places[1] >> 40).unlink()
    reader = Reader(ledger, owner=True)
    assert [reader.read(place) is not None for place in places] == [True, False, True, True]
    reader.close()
    ledger.close()
    assert len(records_of(Ledger(tmp_path, 2))) == 3


def test_records_are_read_by_place(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 1, segment_bytes=1000)
    places = [ledger.append(Type.RESULTS, os.urandom(n), ["batch"]) for n in (1, 900, 400, 0, 500)]
    reader = Reader(ledger, keep_open=1)
    assert [len(record.payload) for p in places if (record := reader.read(p)) is not None] == [1, 900, 400, 0, 500]
    assert reader.pread(places[1] + FRAME, 10) == reader.read(places[1]).payload[:10]  # type: ignore[union-attr]
    reader.close()


def test_sync_says_how_much_is_durable(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 1, segment_bytes=100)
    assert ledger.sync() == 0
    assert not ledger.wait_for_more(0, 0.01)
    for _ in range(5):
        ledger.append(Type.RESULTS, b"x" * 60)
    assert ledger.wait_for_more(0, 5)
    assert ledger.sync() == ledger.written > 300
    assert not ledger.wait_for_more(ledger.written, 0.01)
    ledger.close()


def test_a_full_disk_appends_nothing_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    free = [1 << 40]
    ledger = Ledger(tmp_path, 1, reserve_bytes=1 << 20, free=lambda _: free[0])
    ledger.append(Type.RESULTS, b"first", ["batch"])
    free[0] = 1 << 19
    # The disk is looked at every few records only, well within the reserve.
    for _ in range(1000):
        try:
            ledger.append(Type.RESULTS, b"x" * 1000, ["batch"])
        except DiskFull:
            break
    assert ledger.written < 1 << 18
    written = ledger.written
    with pytest.raises(DiskFull):
        ledger.append(Type.RESULTS, b"refused", ["batch"])
    assert ledger.written == written
    free[0] = 1 << 40
    ledger.append(Type.RESULTS, b"last", ["batch"])
    ledger.close()
    found = records_of(Ledger(tmp_path, 2))
    assert found[0] == b"first"
    assert found[-1] == b"last"
    assert b"refused" not in found


def test_a_write_that_does_not_fit_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path, 1)
    ledger.append(Type.RESULTS, b"first", ["batch"])
    real = os.pwritev
    # Half a record reaches the disk, then it is full.
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: real(fd, [b"".join(parts)[:10]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(DiskFull):
        ledger.append(Type.RESULTS, b"second", ["batch"])
    monkeypatch.undo()
    ledger.append(Type.RESULTS, b"third", ["batch"])
    ledger.close()
    assert records_of(Ledger(tmp_path, 2)) == [b"first", b"third"]
