"""Shows a few answers out of a folder of outputs: `python examples/show_answers.py batchmill-out/demo [HOW_MANY]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def text_of(body: dict[str, Any]) -> str:
    """What the model said, on one line."""
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return " ".join(text.split())


def show(folder: Path, how_many: int) -> None:
    """One answer of each kind of request (custom ids that differ only in their number are a kind), then the errors."""
    kinds: set[str] = set()
    for line in (folder / "output.jsonl").read_bytes().split(b"\n")[:-1]:
        result = json.loads(line)
        kind = result["custom_id"].rstrip("0123456789-")
        if kind not in kinds and len(kinds) < how_many:
            kinds.add(kind)
            print(f"{result['custom_id']:>15}  {text_of(result['response']['body'])[:200]}")
    for line in (folder / "errors.jsonl").read_bytes().split(b"\n")[:-1]:
        result = json.loads(line)
        reason = result["error"] or result["response"]["body"].get("error", result["response"]["body"])
        print(f"{result['custom_id']:>15}  refused: {' '.join(reason['message'].split())[:200]}")


if __name__ == "__main__":
    show(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 6)
