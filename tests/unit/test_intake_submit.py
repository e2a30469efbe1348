"""`submit` and `validate` as the command line and the coordinator use them."""

from __future__ import annotations

import gzip
import json
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3

from common.errors import UsageError
from common.messages import Row, decode_rows
from common.pieces import Pieces
from common.registry import ModelVersion, Registry
from common.settings import Cache, Inference, Scheduler, Settings
from common.store import LocalStore
from producers.batch import Batch, read_batch, read_status
from producers.coordinator.batch_files import BatchFiles
from producers.intake import LineError, Options, Rejected, shard_of, submit, submit_bytes, submit_stream, validate

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


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report files are for people to keep; those of tests go with the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def rows_of(store: LocalStore, batch: Batch) -> list[Row]:
    return decode_rows(BatchFiles(store, batch).rows(np.arange(batch.planned, dtype=np.uint32)))


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
    assert store.list("batches") == store.list("active/0") == store.list("incoming") == []
    assert validate(str(path), Settings(), REGISTRY, Options()).errors == report.errors


def test_skip_invalid_makes_error_lines(store: LocalStore) -> None:
    data = b"\n".join([b"[1]", chat("a"), chat("a"), chat("b", max_tokens=-1), chat("c")])
    batch = submit_bytes(data, store, Settings(), REGISTRY, Options(skip_invalid=True))
    assert (batch.requests, batch.planned, batch.invalid) == (5, 2, 3)
    assert sorted(r.index for r in rows_of(store, batch)) == [1, 4]
    found = [(index, json.loads(line)) for index, line in BatchFiles(store, batch).invalid()]
    assert [(n, line["custom_id"], line["error"]["code"]) for n, line in found] == [
        (0, None, "invalid_request"),
        (2, "a", "invalid_request"),
        (3, "b", "invalid_request"),
    ]


def test_the_same_key_gives_the_same_batch(store: LocalStore) -> None:
    options = Options(idempotency_key="k1")
    first = submit_bytes(chat("a"), store, Settings(), REGISTRY, options)
    assert submit_bytes(chat("a"), store, Settings(), REGISTRY, options) == first
    assert store.list("batches") == [first.id]


def test_the_same_key_with_another_file_is_a_mistake(store: LocalStore) -> None:
    options = Options(idempotency_key="k1")
    first = submit_bytes(chat("a"), store, Settings(), REGISTRY, options)
    digests = [blake3(chat(name)).hexdigest() for name in ("a", "b")]
    said = f"^other: is not the file .* key 'k1': {first.id} has blake3 {digests[0]} .*, this one {digests[1]}; "
    with pytest.raises(UsageError, match=said):
        submit_bytes(chat("b"), store, Settings(), REGISTRY, options, "other")
    # Two at once, of which each finds the key free at first.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("producers.intake.submission.find_by_key", lambda *_: None)
        with pytest.raises(UsageError, match=said):
            submit_bytes(chat("b"), store, Settings(), REGISTRY, options, "other")
    assert store.list("batches") == [first.id]
    assert store.list("incoming") == []
    # A message that comes again is known by its id, whatever became of the file that it names.
    message = Options(idempotency_key="celery task 1", key_names_file=False)
    second = submit_bytes(chat("a"), store, Settings(), REGISTRY, message)
    assert submit_bytes(chat("b"), store, Settings(), REGISTRY, message) == second


@pytest.mark.parametrize("skip", [False, True])
def test_a_stream_of_garbage_is_not_read_for_ever(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, skip: bool
) -> None:
    monkeypatch.setattr("producers.intake.reading.MOST_FAULTS", 20_000)

    class Endless:
        """`yes`."""

        def read(self, size: int) -> bytes:
            return b"y\n" * (size // 2)

    with pytest.raises(Rejected, match=r"has \d{5,6} faults up to line \d{5,6}, where reading stopped") as caught:
        submit_stream(Endless(), store, Settings(), REGISTRY, Options(skip_invalid=skip))  # type: ignore[arg-type]
    report = caught.value.report
    assert 20_000 < report.error_count < 400_000
    assert (report.errors[0].line, report.errors[99].line) == (1, 100)
    # Who leaves bad lines out reads on while there are good ones.
    monkeypatch.setattr("producers.intake.reading.MOST_FAULTS", 3)
    some = chat("a") + b"\n" + b"y\n" * 5
    if skip:
        assert submit_bytes(some, store, Settings(), REGISTRY, Options(skip_invalid=True)).invalid == 5


def test_a_report_file_is_for_whoever_can_read_it(store: LocalStore, tmp_path: Path) -> None:
    for wanted in (True, False):
        with pytest.raises(Rejected) as caught:
            submit_bytes(b"y\n" * 200, store, Settings(), REGISTRY, Options(report_file=wanted))
        assert caught.value.report.error_count == 200
        assert (caught.value.report.report_file is not None) == wanted == ("all of them" in str(caught.value))


def test_what_is_no_file_is_one_line(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        submit(str(tmp_path / "none"), store, Settings(), REGISTRY, Options())
    with pytest.raises(UsageError, match="is a folder"):
        submit(str(tmp_path), store, Settings(), REGISTRY, Options())


def test_bad_lines_in_every_window_and_repeats_across(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small windows, so that everything happens at their borders: the output order is that of the lines."""
    monkeypatch.setattr("producers.intake.reading.WINDOW_ROWS", 7)
    lines = []
    for n in range(100):
        if n % 9 == 4:
            lines.append(b"{broken")
        elif n % 9 == 8:
            lines.append(chat(f"id-{n - 8}"))  # a repeat, sometimes across a border
        else:
            lines.append(chat(f"id-{n}", f"group {n % 3} text {n}"))
        if n % 11 == 0:
            lines.append(b"   ")
    bad = {n for n in range(100) if n % 9 in (4, 8)}
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\r\n".join(lines))
    batch = submit(str(path), store, Settings(), REGISTRY, Options(skip_invalid=True))

    assert (batch.requests, batch.planned, batch.invalid) == (100, 100 - len(bad), len(bad))
    rows = rows_of(store, batch)
    assert [r.pos for r in rows] == list(range(batch.planned))
    assert sorted(r.index for r in rows) == [n for n in range(100) if n not in bad]
    for row in rows:
        assert row.custom_id == b'"id-%d"' % row.index
        assert json.loads(row.body)["messages"][0]["content"].endswith(f"text {row.index}")
    found = list(BatchFiles(store, batch).invalid())
    assert [n for n, _ in found] == sorted(bad)
    assert batch.windows[0].index_start == 0
    assert batch.windows[-1].index_end == 100
    for one, other in zip(batch.windows, batch.windows[1:], strict=False):
        assert (one.pos_end, one.index_end) == (other.pos_start, other.index_start)
    for window in batch.windows:
        assert window.index_end - window.index_start <= 7
        inside = {r.index for r in rows[window.pos_start : window.pos_end]}
        assert inside == {n for n in range(window.index_start, window.index_end) if n not in bad}
    assert batch.cost == int(BatchFiles(store, batch).plan(0, batch.planned)["cost"].sum())
    # The same file without the option: the same lines are reported.
    report = validate(str(path), Settings(), REGISTRY, Options())
    assert report.error_count == len(bad)
    assert [e.line for e in report.errors] == sorted(e.line for e in report.errors)
    with pytest.raises(Rejected) as caught:
        submit(str(path), store, Settings(), REGISTRY, Options())
    assert caught.value.report.errors == report.errors


def test_windows_end_by_bytes_too(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.intake.reading.WINDOW_BYTES", 5000)
    data = b"\n".join(chat(f"{n}", "x" * (8000 if n == 5 else 300)) for n in range(20))
    batch = submit_bytes(data, store, Settings(), REGISTRY, Options())
    lengths = BatchFiles(store, batch).plan(0, batch.planned)["length"]
    sizes = [int(lengths[w.pos_start : w.pos_end].sum()) for w in batch.windows]
    assert len(sizes) > 4
    assert max(w.pos_end - w.pos_start for w in batch.windows) > 2
    assert all(size <= 5000 or w.pos_end - w.pos_start == 1 for size, w in zip(sizes, batch.windows, strict=True))
    assert [r.index for r in sorted(rows_of(store, batch), key=lambda r: r.index)] == list(range(20))


def test_what_many_begin_with_fills_no_window(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten documents, and twenty questions on each: planned together in the memory of a few, and answered as asked."""
    monkeypatch.setattr("producers.intake.reading.WINDOW_BYTES", 600_000)
    texts = [f"{n % 10}" * 12_000 + f"question {n}" for n in range(200)]
    data = b"\n".join(chat(f"{n}", text) for n, text in enumerate(texts))
    batch = submit_bytes(data, store, Settings(), REGISTRY, Options())
    assert len(batch.windows) == 1
    rows = decode_rows(BatchFiles(store, batch).rows(np.arange(200, dtype=np.uint32)))
    bodies = [json.loads(row.body) for row in sorted(rows, key=lambda row: row.index)]
    assert [body["messages"][0]["content"] for body in bodies] == texts
    assert len({row.index % 10 for row in rows[:20]}) == 1, "and each document is read once"
    held: list[int] = []
    clear = Pieces.clear

    def counted(pieces: Pieces) -> None:
        held.append(len(pieces._known))
        clear(pieces)

    monkeypatch.setattr(Pieces, "clear", counted)
    alone = b"\n".join(chat(f"{n}", " ".join(str(n + 200 * k) for k in range(2500))) for n in range(200))
    batch = submit_bytes(alone, store, Settings(), REGISTRY, Options())
    assert len(batch.windows) > 4
    assert len(held) >= len(batch.windows), "nothing of a window is kept"


@pytest.mark.parametrize("data", [b"", b"\n\n  \r\n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("skip", [False, True])
def test_a_file_without_requests_is_refused(store: LocalStore, data: bytes, skip: bool) -> None:
    with pytest.raises(Rejected, match="inline: has no requests in it; nothing was submitted") as caught:
        submit_bytes(data, store, Settings(), REGISTRY, Options(skip_invalid=skip))
    assert caught.value.report.requests == 0
    assert [e.reason for e in caught.value.report.errors] == ["has no requests in it"]
    assert caught.value.exit_code == 2
    assert store.list("batches") == store.list("incoming") == []


def test_a_bom_crlf_and_no_final_newline(store: LocalStore) -> None:
    batch = submit_bytes(b"\xef\xbb\xbf" + chat("a") + b"\r\n\r\n" + chat("b"), store, Settings(), REGISTRY, Options())
    assert [r.custom_id for r in rows_of(store, batch)] == [b'"a"', b'"b"']


def test_lines_that_are_not_utf8_are_told_from_their_neighbours(store: LocalStore) -> None:
    data = b"\n".join([chat("a"), chat("b", "BAD").replace(b"BAD", b"\xff\xfe"), chat("c", "é\u2028\u0085")])
    with pytest.raises(Rejected) as caught:
        submit_bytes(data, store, Settings(), REGISTRY, Options())
    (error,) = caught.value.report.errors
    assert error.line == 2
    assert "not UTF-8" in error.reason


def test_a_line_of_20_mb_is_one_bad_line(store: LocalStore) -> None:
    data = b"\n".join([chat("a"), chat("b", "x" * (20 << 20)), chat("c")])
    batch = submit_bytes(data, store, Settings(), REGISTRY, Options(skip_invalid=True))
    assert (batch.planned, batch.invalid) == (2, 1)
    (found,) = BatchFiles(store, batch).invalid()
    assert found[0] == 1
    assert b"line 2: is longer than 8388608 bytes" in found[1]


def test_the_longest_line_that_may_be(store: LocalStore) -> None:
    line = chat("a", "x" * ((8 << 20) - len(chat("a", ""))))
    assert len(line) == 8 << 20
    batch = submit_bytes(line + b"\r\n", store, Settings(), REGISTRY, Options())
    assert batch.planned == 1
    with pytest.raises(Rejected, match="is longer than"):
        submit_bytes(b" " + line + b"\r\n", store, Settings(), REGISTRY, Options())


@pytest.mark.parametrize("skip", [False, True])
def test_a_truncated_file_is_refused_whole(store: LocalStore, tmp_path: Path, skip: bool) -> None:
    data = b"\n".join(chat(f"{n}", f"{n * 7919}") for n in range(20_000))
    for name, packed in (("x.gz", gzip.compress(data)), ("x.zst", zstandard.ZstdCompressor().compress(data))):
        path = tmp_path / name
        path.write_bytes(packed[: len(packed) * 3 // 4])
        with pytest.raises(Rejected, match=r"data ends in the middle .*; nothing was submitted") as caught:
            submit(str(path), store, Settings(), REGISTRY, Options(skip_invalid=skip))
        # Only that: the line that was cut through is not called malformed.
        assert caught.value.report.error_count == 1
        assert store.list("batches") == store.list("incoming") == []


def test_a_file_that_changes_while_it_is_read_is_refused(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(chat(f"{n}") for n in range(20_000)))
    changed: list[tuple[int, int]] = []

    def append(bytes_read: int, lines: int) -> None:
        if not changed:
            changed.append((bytes_read, lines))
            with open(path, "ab") as file:
                file.write(b"\n" + chat("late"))

    with pytest.raises(Rejected, match=r"in\.jsonl: changed while it was read; submit it again"):
        submit(str(path), store, Settings(), REGISTRY, Options(), append)
    assert changed[0][0] > 0
    assert changed[0][1] > 0
    assert store.list("batches") == store.list("incoming") == []


def test_progress_counts_bytes_and_lines(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(chat(f"{n}") for n in range(20_000)))
    seen: list[tuple[int, int]] = []
    batch = submit(str(path), store, Settings(), REGISTRY, Options(), lambda *now: seen.append(now))
    assert seen == sorted(seen)
    assert seen[-1] == (path.stat().st_size, 20_000)
    assert batch.input.bytes == path.stat().st_size
    assert batch.input.digest == blake3(path.read_bytes()).hexdigest()


def test_all_lines_bad_is_a_batch_of_errors(store: LocalStore) -> None:
    batch = submit_bytes(b"[1]\n[2]", store, Settings(), REGISTRY, Options(skip_invalid=True))
    assert (batch.requests, batch.planned, batch.invalid, batch.model) == (2, 0, 2, "tiny@1")
    assert store.size(f"batches/{batch.id}/plan") == 0
    assert [n for n, _ in BatchFiles(store, batch).invalid()] == [0, 1]


@pytest.mark.parametrize("count", [1, 100])
def test_errors_that_are_all_shown_leave_no_file(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("producers.intake.refusals.tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"[1]\n" * count)
    assert validate(str(path), Settings(), REGISTRY, Options()).report_file is None
    with pytest.raises(Rejected) as caught:
        submit(str(path), store, Settings(), REGISTRY, Options())
    assert (len(caught.value.report.errors), caught.value.report.report_file) == (count, None)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_more_errors_than_are_shown(store: LocalStore) -> None:
    data = b"\n".join([chat("a")] + [b"[%d]" % n for n in range(250)])
    with pytest.raises(Rejected, match="250 of 251 requests are not valid, nothing was submitted; first, line 2") as e:
        submit_bytes(data, store, Settings(), REGISTRY, Options(), "in/put file.jsonl")
    report = e.value.report
    assert (len(report.errors), report.error_count) == (100, 250)
    assert report.report_file is not None
    assert report.report_file in str(e.value)
    with open(report.report_file, "rb") as file:
        assert [msgspec.json.decode(line, type=LineError).line for line in file] == list(range(2, 252))
    assert "\n" not in str(e.value)


def test_a_report_file_that_cannot_be_written_spoils_nothing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> tuple[int, str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("producers.intake.refusals.tempfile.mkstemp", full)
    with pytest.raises(Rejected) as caught:
        submit_bytes(b"[1]\n" * 101, store, Settings(), REGISTRY, Options())
    assert caught.value.report.report_file is None
    assert caught.value.report.error_count == 101


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (Options(max_tokens_default=0), "--max-tokens-default: 0 is too small"),
        (Options(cache="maybe"), "cache: 'maybe' is not one of"),
        (Options(timeout_s=0), "timeout: 0 is not"),
        (Options(timeout_s=float("nan")), "timeout: nan is not"),
        (Options(idempotency_key=""), "idempotency key"),
        (Options(metadata={"k": "v" * 600}), "metadata: 'k'"),
        (Options(metadata={f"{n}": "" for n in range(17)}), "metadata: 17 pairs"),
        (Options(name="caf\udce9"), "name: 'caf.*' is not Unicode"),
        (Options(idempotency_key="\udce9"), "idempotency key: .* is not Unicode"),
        (Options(metadata={"\ud800": "v"}), "metadata: .* is not Unicode"),
        (Options(metadata={"k": "\udfff"}), "metadata: .* is not Unicode"),
        (Options(model="nope"), "unknown model 'nope'"),
        (Options(tenant="a b"), "tenant: 'a b' must be"),
        (Options(priority="huge"), "priority: 'huge' is not one of low, normal, high, urgent"),
        (Options(completion_window="24"), "completion window: '24' is not a duration"),
        (Options(not_before="soon"), "not before: 'soon' is neither a time"),
        (Options(run_between="22-6"), "run between: '22-6' is not a daily window"),
        (Options(max_tokens_default=4096), "more than the context of tiny@1"),
    ],
)
def test_options_that_cannot_be(store: LocalStore, options: Options, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        submit_bytes(chat("a"), store, Settings(), REGISTRY, options)
    assert store.list("batches") == store.list("incoming") == []


def test_when_a_batch_may_run_is_fixed_at_submission(store: LocalStore) -> None:
    before = time.time()
    options = Options(tenant="lab", priority="high", completion_window="2h", not_before="1h", run_between="1:00-5:00")
    batch = read_batch(store, submit_bytes(chat("a"), store, Settings(), REGISTRY, options).id)
    assert (batch.tenant, batch.priority, batch.run_between) == ("lab", "high", "01:00-05:00 UTC")
    assert batch.expires_at is not None
    assert batch.not_before is not None
    assert batch.expires_at - batch.created_at == 7200
    assert before + 3600 <= batch.not_before == batch.created_at + 3600
    plain = read_batch(store, submit_bytes(chat("a"), store, Settings(), REGISTRY, Options()).id)
    assert (plain.tenant, plain.priority, plain.expires_at, plain.not_before) == ("default", "normal", None, None)


def test_a_files_name_may_be_any_bytes(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9.jsonl"
    path.write_bytes(chat("a"))
    batch = submit(str(path), store, Settings(), REGISTRY, Options())
    assert read_batch(store, batch.id).input.name == str(tmp_path / "caf?.jsonl")


def test_what_the_batch_remembers(store: LocalStore) -> None:
    settings = Settings(
        inference=Inference(request_timeout_s=33), scheduler=Scheduler(shards=5), cache=Cache(url="redis://h")
    )
    batch = submit_bytes(chat("a"), store, settings, REGISTRY, Options(cache="on", timeout_s=5))
    assert (batch.cache, batch.timeout_s, batch.shard) == ("on", 5, shard_of(batch.id, 5))
    assert store.list(f"active/{batch.shard}") == [batch.id]
    other = submit_bytes(chat("a"), store, settings, REGISTRY, Options())
    assert (other.cache, other.timeout_s) == ("off", 33)
    assert {shard_of(f"batch_{n}", 4) for n in range(100)} == {0, 1, 2, 3}


def test_files_with_prompts_are_private(store: LocalStore) -> None:
    batch = submit_bytes(chat("a"), store, Settings(), REGISTRY, Options())
    folder = store.local_path(f"batches/{batch.id}")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in folder.iterdir()} == {0o600}


@pytest.mark.parametrize(("size", "counts"), [(450, (80_000, 200_000)), (60_000, (1500, 3500))])
def test_memory_does_not_follow_the_size_of_the_file(tmp_path: Path, size: int, counts: tuple[int, int]) -> None:
    """Peak memory of a whole process, at more than one window and at more than twice that."""
    code = """
import re, sys
from common.registry import ModelVersion, Registry
from common.settings import Settings
from common.store import open_store
from producers.intake import Options, submit
registry = Registry({"m@1": ModelVersion(source="x")}, {}, "m")
submit(sys.argv[1], open_store(sys.argv[2]), Settings(), registry, Options())
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""
    peaks = []
    for count in counts:
        path = tmp_path / f"{count}.jsonl"
        with open(path, "wb") as file:
            for n in range(count):
                file.write(chat(f"{n}", f"{n} " + "x" * size) + b"\n")
        done = subprocess.run(
            [sys.executable, "-c", code, str(path), str(tmp_path / "store")],
            capture_output=True,
            timeout=120,
            check=True,
        )
        peaks.append(int(done.stdout) / 1024)
        path.unlink()
    assert peaks[1] < peaks[0] * 1.15
    assert peaks[1] < 150
