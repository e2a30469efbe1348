"""The files that Batchmill and its peers are compared with hold what the table says of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import files, lines


def _bodies(tmp_path: Path, word: str, round_: int = 7) -> list[dict[str, Any]]:
    path = tmp_path / f"{word}-{round_}.jsonl"
    requests, tokens = files.write(path, files.KINDS[word], round_, "m@1")
    bodies = [line["body"] for line in lines.read(path)]
    assert (len(bodies), sum(body["max_tokens"] for body in bodies)) == (requests, tokens)
    return bodies


def _asked(body: dict[str, Any]) -> str:
    return json.dumps(body["messages"])


@pytest.mark.parametrize("word", files.KINDS)
def test_every_answer_has_exactly_the_tokens_asked_for_and_no_prompt_comes_again_in_another_round(
    tmp_path: Path, word: str
) -> None:
    bodies = _bodies(tmp_path, word)
    assert all(body["min_tokens"] == body["max_tokens"] and body["temperature"] == 0 for body in bodies)
    assert not {_asked(b) for b in bodies} & {_asked(b) for b in _bodies(tmp_path, word, 8)}
    assert bodies == _bodies(tmp_path, word)


def test_the_kinds_are_what_their_titles_say(tmp_path: Path) -> None:
    distinct = {word: len({_asked(b) for b in _bodies(tmp_path, word)}) for word in files.KINDS}
    assert distinct == {
        "unique": 256,
        "prefixes": 240,
        "small-blocks": 240,
        "duplicates": 128,
        "again": 256,
        "mixed": 256,
        "start": 128,
    }
    prefixes = [b["messages"][0] for b in _bodies(tmp_path, "prefixes")]
    assert len({p["content"] for p in prefixes}) == 48
    assert all(p["role"] == "system" and len(p["content"].split()) > 400 for p in prefixes)
    # Shuffled: hardly ever two neighbours with the same prefix.
    assert sum(a == b for a, b in itertools.pairwise(prefixes)) < 30
    mixed = [b["max_tokens"] for b in _bodies(tmp_path, "mixed")]
    assert min(mixed) < 12
    assert max(mixed) == 512
    assert sorted(mixed)[128] < 120


def test_only_kinds_that_want_the_same_engine_share_one() -> None:
    groups = files.together(list(files.KINDS))
    assert groups == [["unique", "duplicates", "again", "start"], ["prefixes"], ["small-blocks"], ["mixed"]]


def test_answers_and_their_tokens_are_counted_and_errors_are_not(tmp_path: Path) -> None:
    output = tmp_path / "output.jsonl"
    error = {"custom_id": "c", "response": {"status_code": 400, "body": {}}}
    output.write_text(lines.answer("a", "x", 3) + lines.answer("b", "y", 4) + json.dumps(error) + "\n")
    assert files.answered(output) == (2, 7)
