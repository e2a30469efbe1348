"""Outputs leave the store whole, in order, and never to a folder that cannot take them."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UsageError
from common.interrupts import terminated_like_interrupted
from common.new_file import replacing
from common.object_store import ObjectStore
from common.store import LocalStore
from producers import outputs
from producers.batch import Batch
from tests.support import oracle, stored


def test_deliver_copies_all_three_files_for_the_user_to_own(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    of = stored.batch(store)
    stored.outputs(store, of, {2, 3})
    target = tmp_path / "a" / "b"
    put = outputs.deliver(store, of.id, target)
    assert (put.output, put.errors, put.summary) == tuple(str(target / n) for n in outputs.FILES)
    for name in outputs.FILES:
        assert (target / name).read_bytes() == store.read(f"batches/{of.id}/{name}")
        # Not a hard link: who edits an output must not edit the store.
        assert (target / name).stat().st_nlink == 1
    assert sorted(os.listdir(target)) == sorted(outputs.FILES)
    (target / "output.jsonl").write_text("mine")
    outputs.deliver(store, of.id, target)
    assert (target / "output.jsonl").read_bytes() == store.read(f"batches/{of.id}/output.jsonl")


def test_deliver_falls_back_where_the_kernel_cannot_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path / "store")
    of = stored.batch(store)
    stored.outputs(store, of, set())

    def refuse(*_: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    outputs.deliver(store, of.id, tmp_path / "out")
    assert (tmp_path / "out/output.jsonl").read_bytes() == store.read(f"batches/{of.id}/output.jsonl")


def test_deliver_and_lines_from_an_object_store(tmp_path: Path) -> None:
    store = ObjectStore(f"memory://{tmp_path.name}")
    of = stored.batch(store)
    made = stored.outputs(store, of, {4})
    outputs.deliver(store, of.id, tmp_path / "out")
    assert (tmp_path / "out/output.jsonl").read_bytes() == b"".join(made[:4] + made[5:])
    assert list(outputs.lines(store, of.id)) == made
    with pytest.raises(outputs.NoOutputs, match=r"has no output\.jsonl"):
        outputs.deliver(store, stored.batch(store).id, tmp_path / "out")


def test_a_full_disk_leaves_no_torn_file_and_says_how_to_get_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "store")
    of = stored.batch(store)
    stored.outputs(store, of, set())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "_copy", full)
    with pytest.raises(UsageError, match=f"No space left.*producers results {of.id} --output DIR"):
        outputs.deliver(store, of.id, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def _ended(tmp_path: Path) -> tuple[LocalStore, Batch]:
    store = LocalStore(tmp_path / "store")
    of = stored.batch(store)
    stored.outputs(store, of, {3})
    stored.status(store, of, "completed", 9, 1)
    return store, of


@pytest.mark.parametrize("name", outputs.FILES)
@pytest.mark.parametrize("harm", ["gone", "cut", "torn", "other"])
def test_outputs_that_the_store_lost_are_not_handed_out(tmp_path: Path, name: str, harm: str) -> None:
    store, of = _ended(tmp_path)
    path = store.local_path(f"batches/{of.id}/{name}")
    whole = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        lines = whole.splitlines(keepends=True)
        other = whole.replace(b"1", b"2") if name == outputs.OUTPUT else whole.replace(b"o", b"0")
        path.write_bytes({"cut": b"".join(lines[:-1]), "torn": whole[:-9], "other": other}[harm])
        assert path.read_bytes() != whole
    for attempt in (lambda: outputs.deliver(store, of.id, tmp_path / "out"), lambda: list(outputs.lines(store, of.id))):
        with pytest.raises(outputs.DamagedOutputs, match=rf"{of.id}: .*{name}|{of.id}: its outputs") as caught:
            attempt()
        assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    store, of = _ended(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / "errors.jsonl")
    for attempt in (lambda: outputs.check_folder(out), lambda: outputs.deliver(store, of.id, out)):
        with pytest.raises(UsageError, match=r"errors\.jsonl: is a FIFO, not a regular file"):
            attempt()
    assert os.listdir(out) == ["errors.jsonl"]
    (out / "errors.jsonl").unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("old")
    (out / "errors.jsonl").symlink_to(elsewhere)
    outputs.deliver(store, of.id, out)
    assert (out / "errors.jsonl").is_symlink()
    assert elsewhere.read_bytes() == store.read(f"batches/{of.id}/errors.jsonl")


def test_what_a_killed_process_left_is_swept_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    target = tmp_path / "output.jsonl"
    left = tmp_path / ".output.jsonl.0123abcd.part"
    left.write_text("half")
    with replacing(target) as one:
        assert not left.exists()
        one.write(b"one")
        one.flush()
        with replacing(target) as two:
            two.write(b"two")
        assert target.read_bytes() == b"two"
    assert target.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["output.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_leave_nothing_half(tmp_path: Path, number: int) -> None:
    before = signal.getsignal(number)

    def interrupted() -> None:
        with terminated_like_interrupted(), replacing(tmp_path / "x") as file:
            file.write(b"half")
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []
    assert signal.getsignal(number) == before


def test_check_folder_leaves_nothing_and_finds_what_cannot_be_written(tmp_path: Path) -> None:
    outputs.check_folder(tmp_path / "x" / "y")
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="is not a folder"):
            outputs.check_folder(bad)
    # Nobody can make a folder there, not even root.
    with pytest.raises(UsageError, match="cannot be written"):
        outputs.check_folder(Path("/proc/batchmill-out"))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is not a folder"):
        outputs.check_folder(tmp_path / "dangling")


@given(st.sets(st.integers(0, 40)), st.integers(0, 40))
def test_merge_gives_input_order_whatever_failed(failed: set[int], total: int) -> None:
    lines = [b'{"id":"batch_req_0123_%d","custom_id":"_%d"}\n' % (i, total - i) for i in range(total)]
    good = b"".join(line for i, line in enumerate(lines) if i not in failed)
    bad = b"".join(line for i, line in enumerate(lines) if i in failed)
    assert list(outputs.merge(io.BytesIO(good), io.BytesIO(bad))) == lines


def test_lines_reads_a_batch_in_input_order(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    of = stored.batch(store)
    made = stored.outputs(store, of, {0, 4, 9})
    assert list(outputs.lines(store, of.id)) == made


def _broken(tmp_path: Path, name: str, change: tuple[bytes, bytes]) -> None:
    path = tmp_path / name
    path.write_bytes(path.read_bytes().replace(*change, 1))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("output.jsonl", (b'"c1"', b'"c0"'), "is not"),
        ("output.jsonl", (b'_1"', b'_0"'), "after"),
        ("output.jsonl", (b'"status_code":200', b'"status_code":500'), "batch_req_"),
        ("errors.jsonl", (b'"timeout"', b'""'), "batch_req_"),
        ("errors.jsonl", (b'_5"', b'_4"'), "is answered twice"),
        ("errors.jsonl", (b"}\n", b"}"), "cut"),
    ],
)
def test_the_oracle_sees_what_is_wrong(tmp_path: Path, name: str, change: tuple[bytes, bytes], complaint: str) -> None:
    store = LocalStore(tmp_path / "store")
    of = stored.batch(store)
    stored.outputs(store, of, {5})
    outputs.deliver(store, of.id, tmp_path)
    expected = [f"c{i}" for i in range(10)]
    oracle.check(tmp_path, of.id, expected, partial=True)
    _broken(tmp_path, name, change)
    with pytest.raises(AssertionError, match=complaint):
        oracle.check(tmp_path, of.id, expected, partial=True)


def test_the_oracle_notices_a_lost_request(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    of = stored.batch(store)
    stored.outputs(store, of, {5})
    outputs.deliver(store, of.id, tmp_path)
    with pytest.raises(AssertionError, match="1 requests have no answer: \\['lost'\\]"):
        oracle.check(tmp_path, of.id, [*(f"c{i}" for i in range(10)), "lost"])
