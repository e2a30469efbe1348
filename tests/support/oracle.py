"""The end-to-end oracle: what must hold for the outputs of any batch, whatever happened to the fleet meanwhile.

Every request of the input is in exactly one of the two files, exactly once; both are in input order; a line's id tells
batch and index; successes and failures are in the right file; the summary counts what is there and its digests fit.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard
from blake3 import blake3

from common.ids import result_id

_KEYS = {"id", "custom_id", "response", "error", "batchmill"}


@dataclass(frozen=True)
class Checked:
    """Outputs that passed: the parsed lines of both files, and the summary."""

    output: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    summary: dict[str, Any]

    def content(self, custom_id: str) -> str:
        """What a chat request was answered."""
        (found,) = [line for line in self.output if line["custom_id"] == custom_id]
        text: str = found["response"]["body"]["choices"][0]["message"]["content"]
        return text

    def code(self, custom_id: str) -> str | int:
        """Why a request failed: an HTTP status, or the code of what never got an answer."""
        (found,) = [line for line in self.errors if line["custom_id"] == custom_id]
        code: str | int = found["response"]["status_code"] if found["response"] else found["error"]["code"]
        return code


def input_ids(source: Path | bytes) -> list[str]:
    """The custom_ids of a valid input file (plain, .gz or .zst), in its order; blank lines are no requests."""
    raw = source if isinstance(source, bytes) else source.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    elif raw[:4] == b"\x28\xb5\x2f\xfd":
        raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)).read()
    return [json.loads(line)["custom_id"] for line in raw.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]


def check(
    folder: Path,
    batch_id: str,
    expected: Sequence[str | None],
    *,
    failed: Iterable[str | None] | None = None,
    partial: bool = False,
) -> Checked:
    """`AssertionError` unless the outputs in `folder` are those of `expected` (custom_ids in input order).

    `failed`: exactly these are in errors.jsonl. `partial`: requests may be missing and there is no summary.
    """
    output, errors = (_read(folder / name) for name in ("output.jsonl", "errors.jsonl"))
    seen: dict[int, str | None] = {}
    for name, lines in (("output.jsonl", output), ("errors.jsonl", errors)):
        last = -1
        for number, line in enumerate(lines, 1):
            where = f"{name}:{number}"
            assert set(line) == _KEYS, f"{where}: keys {sorted(line)}"
            index = int(line["id"].rpartition("_")[2])
            assert line["id"] == result_id(batch_id, index), f"{where}: id {line['id']}"
            assert index > last, f"{where}: index {index} after {last}"
            assert index not in seen, f"{where}: index {index} is answered twice"
            assert index < len(expected), f"{where}: index {index} of {len(expected)} requests"
            assert line["custom_id"] == expected[index], f"{where}: {line['custom_id']!r} is not {expected[index]!r}"
            seen[index] = line["custom_id"]
            last = index
    _check_kinds(output, errors)
    if partial:
        return Checked(output, errors, {})
    missing = [expected[i] for i in range(len(expected)) if i not in seen]
    assert not missing, f"{len(missing)} requests have no answer: {missing[:5]}"
    if failed is not None:
        there = [line["custom_id"] for line in errors]
        wanted = list(failed)
        assert sorted(map(str, there)) == sorted(map(str, wanted)), f"errors.jsonl has {there}, not {wanted}"
    summary = json.loads((folder / "summary.json").read_bytes())
    _check_summary(summary, batch_id, folder, output, errors)
    return Checked(output, errors, summary)


def _read(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    assert not raw or raw.endswith(b"\n"), f"{path.name}: the last line is cut"
    return [json.loads(line) for line in raw.split(b"\n")[:-1]]


def _check_kinds(output: list[dict[str, Any]], errors: list[dict[str, Any]]) -> None:
    for line in output:
        assert line["error"] is None, line["id"]
        assert 200 <= line["response"]["status_code"] < 300, line["id"]
        assert line["response"]["body"], line["id"]
    for line in errors:
        if line["response"] is None:
            assert line["error"]["code"], line["id"]
            assert line["error"]["message"], line["id"]
        else:
            assert line["error"] is None, line["id"]
            assert line["response"]["status_code"] >= 300, line["id"]


def _check_summary(
    summary: dict[str, Any],
    batch_id: str,
    folder: Path,
    output: list[dict[str, Any]],
    errors: list[dict[str, Any]],
) -> None:
    assert summary["id"] == batch_id
    counts = (len(output) + len(errors), len(output), len(errors))
    said = (summary["total"], summary["completed"], summary["failed"])
    assert said == counts, f"the summary says {said}, the files have {counts}"
    for key, name, lines in (("output", "output.jsonl", output), ("errors", "errors.jsonl", errors)):
        raw = (folder / name).read_bytes()
        facts = {"lines": len(lines), "bytes": len(raw), "digest": blake3(raw).hexdigest()}
        assert summary[key] == facts, f"{name}: the summary says {summary[key]}, it is {facts}"
    marks = [line["batchmill"] for line in output]
    marked = {
        "cache_hits": sum(mark.get("cached") is True for mark in marks),
        "cache_misses": sum(mark.get("cached") is False for mark in marks),
        "shared": sum(mark.get("shared") is True for mark in marks),
    }
    said_of_them = {name: summary["usage"][name] for name in marked}
    assert said_of_them == marked, f"the lines are marked {marked}, the summary says {said_of_them}"
