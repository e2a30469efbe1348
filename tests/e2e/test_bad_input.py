"""Bad input on the whole path: every bad line is told of, and costs its own result alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from common.store import LocalStore
from tests.e2e.conftest import Shell, chat, on_one_broker
from tests.support import oracle


def _line(custom_id: Any, **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "body": {"prompt": "hi", **body}}).encode()


#: name → (line, its custom_id in the results when it is skipped, where the fault is told). What is no JSON has no id.
BAD: dict[str, tuple[bytes, str | None, str]] = {
    "an array": (b"[1]", None, ""),
    "null": (b"null", None, ""),
    "a string": (b'"x"', None, ""),
    "no JSON": (b'{"custom_id": "cut"', None, ""),
    "not UTF-8": (b'{"custom_id":"\xff","body":{"prompt":"x"}}', None, ""),
    "custom_id missing": (b'{"body":{"prompt":"x"}}', None, "custom_id"),
    "custom_id null": (_line(None), None, "custom_id"),
    "custom_id a number": (_line(7), None, "custom_id"),
    "custom_id empty": (_line(""), None, "custom_id"),
    "custom_id of 10 kB": (_line("x" * 10_000), None, "custom_id"),
    "custom_id again": (_line("good-1"), "good-1", "custom_id"),
    "custom_id twice": (b'{"custom_id":"a","custom_id":"last","body":{"prompt":"x"}}', "last", "custom_id"),
    "a lone surrogate": (b'{"custom_id":"sur","body":{"prompt":"\\ud800"}}', None, ""),
    "NaN": (b'{"custom_id":"nan","body":{"prompt":"x","temperature":NaN}}', None, ""),
    "Infinity": (b'{"custom_id":"inf","body":{"prompt":"x","temperature":-Infinity}}', None, ""),
    "deep nesting": (b'{"custom_id":"deep","body":{"prompt":"x","y":' + b"[" * 5000 + b"]" * 5000 + b"}}", None, ""),
    "stream": (_line("stream", stream=True), "stream", "body.stream"),
    "an unknown url": (b'{"custom_id":"url","url":"/v1/nonsense","body":{"prompt":"x"}}', "url", "url"),
    "an unknown model": (_line("model", model="gpt-17"), "model", "body.model"),
    "max_tokens negative": (_line("neg", max_tokens=-1), "neg", "body.max_tokens"),
    "max_tokens of a wrong type": (_line("type", max_tokens="many"), "type", "body.max_tokens"),
    "no body": (b'{"custom_id":"bodiless"}', "bodiless", "body"),
    "20 MB": (_line("large", user="x" * 20_000_000), None, ""),
}

#: Unusual, and valid.
GOOD: list[bytes] = [
    _line("good-1"),
    _line("good-2"),
    '{"custom_id":"separators \u2028\u0085","body":{"prompt":"a\u2028b\u0085c"}}'.encode(),
    b'{"custom_id":"beyond 2^64","body":{"prompt":"x","seed":1180591620717411303424}}\r',
    b'{"custom_id":"a key twice","body":{"prompt":"x","prompt":"y"}}',
    _line("extra", an_unknown_field={"a": [1, 2, {"b": None}]}),
]


@on_one_broker
def test_every_bad_line_is_told_of_and_costs_itself_alone(fleet: Shell) -> None:
    lines: list[bytes] = []
    expected: list[str | None] = []
    faults: list[tuple[int, str]] = []
    good = iter(GOOD)
    for line, custom_id, field in BAD.values():
        if (valid := next(good, None)) is not None:
            lines += [valid, b"", b"  \t"]
            expected.append(_custom_id(valid))
        lines.append(line)
        expected.append(custom_id)
        faults.append((len(lines), field))
    path = fleet.folder / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))  # a BOM, and no final newline
    report = fleet.run("validate", str(path), "--json", code=2).json
    assert report["requests"] == len(expected)
    assert [error["line"] for error in report["errors"]] == [number for number, _ in faults]
    for error, (_, field), name in zip(report["errors"], faults, BAD, strict=True):
        assert error["field"].startswith(field), f"{name}: {error}"
        assert error["reason"], name
        assert len(error["reason"]) < 300, name
    fleet.run("submit", str(path), code=2)
    assert fleet.run("list", "--json").json["data"] == []
    shown = fleet.run("submit", str(path), "--skip-invalid", "--output", "out", "--json", code=1).json
    failed = [custom_id for _, custom_id, _ in BAD.values()]
    checked = oracle.check(fleet.folder / "out", shown["id"], expected, failed=failed)
    assert len(checked.output) == len(GOOD)
    assert {line["error"]["code"] for line in checked.errors} == {"invalid_request"}
    assert checked.summary["invalid"] == len(BAD)


def _custom_id(line: bytes) -> str:
    found: str = json.loads(line)["custom_id"]
    return found


@on_one_broker
def test_what_only_the_engine_can_judge_fails_alone(fleet: Shell) -> None:
    requests = [chat("fine", "x"), chat("too long", "word " * 5000), chat("too many", "x", max_tokens=10**9)]
    path = fleet.write("in.jsonl", [*requests, {"custom_id": "no such", "body": {"input": "x", "model": "echo-test"}}])
    shown = fleet.run("submit", str(path), "--output", "out", "--json", code=None).json
    if "errors" in shown:  # Refused at once, where the registry tells the model's context.
        assert [(e["line"], e["field"]) for e in shown["errors"]] == [(3, "body.max_tokens")]
        path = fleet.write("in.jsonl", [requests[0], requests[1]])
        shown = fleet.run("submit", str(path), "--output", "out", "--json", code=1).json
    checked = oracle.check(fleet.folder / "out", shown["id"], oracle.input_ids(path), failed=["too long"])
    assert checked.code("too long") == 400


@on_one_broker
@pytest.mark.parametrize("what", ["empty", "blank", "truncated", "folder", "missing", "utf16"])
def test_files_that_are_no_batch(shell: Shell, what: str) -> None:
    path = shell.folder / "in.jsonl"
    whole = gzip.compress(b"".join(_line(f"c{n}") + b"\n" for n in range(1000)))
    content = {
        "empty": b"",
        "blank": b"\n\r\n  \n",
        "truncated": whole[: len(whole) // 2],
        "utf16": '{"custom_id":"a"}'.encode("utf-16"),
    }
    if what == "folder":
        path.mkdir()
    elif what in content:
        path.write_bytes(content[what])
    for argv in (["validate", str(path)], ["submit", str(path)], ["submit", str(path), "--skip-invalid"]):
        done = shell.run(*argv, code=2)
        assert f"{path}" in done.out + done.err
        if argv[0] == "submit":
            assert done.err.splitlines()[-1].startswith("producers: error: ")
    assert LocalStore(Path(shell.env["BATCHMILL_STORE_URL"])).list("batches") == []
    assert not (shell.folder / "batchmill-out").exists()
