"""`workers tune`: what is tried, what is best, and what becomes of models.yaml."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard
from click.testing import CliRunner

from common import plain_yaml
from common.errors import UsageError
from common.registry import ModelVersion
from workers.cli import app
from workers.lane import Lane
from workers.tune import edit, point, sample, sweep
from workers.tune.point import Measured, Numbers, with_numbers

VALUES = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}

BLOCK = """\
# The fleet's models.
default: a@1   # the usual one

models:
  a@1:
    source: /models/a  # weights
    engine:
      # found by trial
      max_model_len: 2048
      max-num-seqs: 128   # too many?
      dtype: "bfloat16"
    hardware: { gpus: 0 }
  b@1: { source: /models/b, engine: { max_num_seqs: 8 } }
"""


def _numbers(seqs: int, tokens: int, chunk: int = 0) -> Numbers:
    return Numbers(max_num_seqs=seqs, max_num_batched_tokens=tokens, chunk=chunk)


def test_only_the_numbers_and_a_comment_change_in_an_entry_of_blocks() -> None:
    edited = edit.with_values(BLOCK, "a@1", VALUES, "10 requests/s")
    before = BLOCK.splitlines()
    after = edited.splitlines()
    assert [line for line in after if line not in before] == [
        "  # workers tune: 10 requests/s",
        "      max_num_batched_tokens: 4096",
        "      max-num-seqs: 64   # too many?",
    ]
    assert [line for line in before if line not in after] == ["      max-num-seqs: 128   # too many?"]
    # A second time it replaces what the first one wrote.
    again = edit.with_values(edited, "a@1", VALUES | {"max_num_seqs": 32}, "12 requests/s")
    assert again == edited.replace("10 requests/s", "12 requests/s").replace("seqs: 64", "seqs: 32")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("models: {a@1: {source: /m, engine: {max_num_seqs: 1, dtype: auto}}}\n", "dtype: auto"),
        ("models:\n  a@1: {source: /m, engine: {}}\n", "source: /m"),
        ("models:\n  a@1: {source: /m}\n", "source: /m"),
        ("models:\n  a@1:\n    source: /m\n    engine:\n    cache: all\n", "    cache: all\n"),
        ("models:\r\n  a@1:\r\n    source: /m\r\n    engine:\r\n      dtype: auto\r\n", "      dtype: auto\r\n"),
        (
            "models:\n  'a@1':\n    engine: {\n      dtype: auto, # as it is\n    }\n    source: /m",
            "dtype: auto, # as it is\n",
        ),
    ],
)
def test_every_style_of_an_entry_can_be_edited(text: str, expected: str) -> None:
    edited = edit.with_values(text, "a@1", VALUES, "fast")
    assert expected in edited
    engine = plain_yaml.parse(edited)["models"]["a@1"]["engine"]
    assert engine == {**(plain_yaml.parse(text)["models"]["a@1"].get("engine") or {}), **VALUES}
    assert ("\r\n" in text) == ("\r\n" in edited)
    assert edited.count("\n") - edited.count("\r\n") == (0 if "\r\n" in text else edited.count("\n"))


@pytest.mark.parametrize(
    "text",
    [
        "models:\n  b@1: {source: /b, engine: &e {max_num_seqs: 1}}\n  a@1: {source: /a, engine: *e}\n",
        "models:\n  b@1: {source: /b}\n",
    ],
)
def test_what_cannot_be_edited_alone_is_left_alone(text: str) -> None:
    with pytest.raises(UsageError, match="set max_num_seqs and max_num_batched_tokens by hand"):
        edit.with_values(text, "a@1", VALUES, "fast")


def test_the_file_keeps_its_mode_and_its_name_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(BLOCK)
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    with path.open() as before:
        edit.write(link, "a@1", VALUES, "fast")
        assert before.read() == BLOCK, "who reads it meanwhile, or after a kill in the middle, has all of the old one"
    assert link.is_symlink()
    assert path.read_text() == edit.with_values(BLOCK, "a@1", VALUES, "fast")
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.yaml", "models.yaml"]


def test_the_sweep_tries_all_combinations_around_what_is_there() -> None:
    entry = ModelVersion(source="/m", engine={"max-num-seqs": 64, "max_num_batched_tokens": 2048, "dtype": "auto"})
    now = sweep.present(entry)
    assert sweep.grid(now, (), (), ()) == [_numbers(s, t) for s in (32, 64, 128) for t in (2048, 4096)]
    assert sweep.grid(now, (8,), (512, 512), (4, 2)) == [_numbers(8, 512, 4), _numbers(8, 512, 2)]
    assert with_numbers(entry, _numbers(8, 512)).engine == {
        "dtype": "auto",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
    }


def test_the_fastest_wins_and_among_equals_what_is_there_then_the_smaller_one() -> None:
    def ran(seqs: int, tokens: int, seconds: float, problem: str | None = None) -> Measured:
        return Measured(numbers=_numbers(seqs, tokens), seconds=seconds, answered=100, problem=problem)

    now = _numbers(64, 2048)
    points = [ran(32, 2048, 12.0), ran(64, 2048, 10.1), ran(128, 2048, 10.0), ran(256, 2048, 1.0, "no memory")]
    found = sweep.best(points, now)
    assert found is points[1]
    assert sweep.best([points[0], points[2], ran(128, 4096, 9.95)], now) is points[2]
    assert sweep.best([points[3]], now) is None


@pytest.mark.parametrize("case", ["fine", "shared", "echo", "changed"])
def test_what_was_measured_is_said_also_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """An anchor is seen before the sweep and does not keep it from running."""
    shared = "models:\n  b@1: {source: /b, engine: &e {max_num_seqs: 4}}\n  a@1: {source: /a, engine: *e}\n"
    path = tmp_path / "models.yaml"
    path.write_text(shared if case == "shared" else BLOCK)
    (tmp_path / "sample.jsonl").write_text('{"body":{"prompt":"x"}}\n')
    monkeypatch.setenv("BATCHMILL_MODELS", str(path))
    monkeypatch.setenv("BATCHMILL_INFERENCE_ENGINE", "echo" if case == "echo" else "vllm")

    def run(_model: str, points: list[Numbers], *_: object) -> list[Measured]:
        if case == "changed":
            path.write_text(shared)
        return [Measured(numbers=p, seconds=1.0, answered=p.max_num_seqs) for p in points]

    monkeypatch.setattr(sweep, "run", run)
    argv = ["tune", "--model", "a@1", "--sample", str(tmp_path / "sample.jsonl"), "--max-num-seqs", "32,77", "--json"]
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["best"]["max_num_seqs"] == 77
    if case == "fine":
        assert (found["written"], found["not_written"]) == (str(path), None)
        assert "max-num-seqs: 77   # too many?" in path.read_text()
        return
    assert found["written"] is None
    assert ("echo" if case == "echo" else "cannot be edited without changing others") in found["not_written"]
    assert path.read_text() == (BLOCK if case == "echo" else shared)
    assert ("nothing will be written" in result.stderr) is (case != "changed")
    said = CliRunner().invoke(app, argv[:-1]).stdout
    assert "best: max_num_seqs 77" in said
    assert "nothing was written: " in said


@pytest.mark.parametrize("form", ["plain", "gzip", "members", "zstd", "frames", "bom"])
def test_a_sample_is_read_in_every_form_that_submit_takes(tmp_path: Path, form: str) -> None:
    lines = [b'{"body":{"prompt":"%d"}}\n' % n for n in range(5000)]
    first, second = b"".join(lines[:2500]), b"".join(lines[2500:])
    zstd = zstandard.ZstdCompressor().compress
    data = {
        "plain": first + second,
        "gzip": gzip.compress(first + second),
        "members": gzip.compress(first) + gzip.compress(second),
        "zstd": zstd(first + second),
        "frames": zstd(first) + zstd(second),
        "bom": b"\xef\xbb\xbf" + first + second,
    }[form]
    path = tmp_path / "sample"
    path.write_bytes(data)
    assert len(sample.read(path, 10_000)) == 5000
    assert sample.read(path, 1) == [(1, b'{"prompt":"0"}')]
    if form == "gzip":
        path.write_bytes(data[:-20])
        with pytest.raises(UsageError, match="cut off or damaged"):
            sample.read(path, 10_000)


def test_a_sample_that_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    """Each engine of a sweep reads it; a pipe that nobody writes into would be waited for without end."""
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", Path("-"), Path("/dev/null")):
        with pytest.raises(UsageError, match="is no regular file") as told:
            sample.read(name, 9)
        assert "each engine" in str(told.value)


@pytest.mark.parametrize(("asked", "chunk"), [(3, 3), (0, 64)])
def test_a_point_feeds_its_engine_in_chunks_of_the_size_that_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int, chunk: int
) -> None:
    (tmp_path / "models.yaml").write_text(BLOCK)
    (tmp_path / "sample.jsonl").write_text('{"body":{"prompt":"x","max_tokens":1}}\n' * 100)
    monkeypatch.setenv("BATCHMILL_MODELS", str(tmp_path / "models.yaml"))
    monkeypatch.setenv("BATCHMILL_INFERENCE_ENGINE", "echo")
    monkeypatch.setenv("BATCHMILL_SCHEDULER_CHUNK_REQUESTS", "64")
    sizes: list[int] = []
    enter = Lane.enter

    def entered(lane: Lane, work: Any, rows: range) -> None:
        sizes.append(len(rows))
        enter(lane, work, rows)

    monkeypatch.setattr(Lane, "enter", entered)
    wanted = point.Wanted(
        model="a@1", numbers=_numbers(8, 64, asked), sample=str(tmp_path / "sample.jsonl"), requests=100
    )
    measured = point.measure(wanted)
    assert (measured.problem, measured.answered) == (None, 100)
    assert (max(sizes), sum(sizes)) == (chunk, 100)


def test_sizes_with_letters_are_numbers() -> None:
    now = sweep.present(ModelVersion(source="/m", engine={"max-num-batched-tokens": "8k"}))
    assert (now.max_num_seqs, now.max_num_batched_tokens) == (sweep.DEFAULT_SEQS, 8000)


def test_a_sample_is_read_in_both_forms_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sample.jsonl"
    path.write_text('{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x"}}\n\n{"body":{"messages":[]}}\n')
    assert sample.read(path, 9) == [(1, b'{"prompt":"x"}'), (0, b'{"messages":[]}')]
    assert len(sample.read(path, 1)) == 1
    path.write_text('{"body":{"prompt":"x"}}\n{"body":{"what":1}}\n')
    with pytest.raises(UsageError, match=r"sample\.jsonl:2: url"):
        sample.read(path, 9)
