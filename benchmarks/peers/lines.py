"""Request lines for vLLM's Python interface, and its outputs as answer lines. Imports nothing of the project.

Shared by the peers that call `LLM.chat`, and by Ray's, which runs under an interpreter of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a request file."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def sampling(body: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a request body."""
    return {name: body[name] for name in ("max_tokens", "min_tokens", "temperature")}


def answer(custom_id: str, text: str, tokens: int) -> str:
    """An answer line with what is compared."""
    message = {"role": "assistant", "content": text}
    body = {"choices": [{"index": 0, "message": message}], "usage": {"completion_tokens": tokens}}
    return json.dumps({"custom_id": custom_id, "response": {"status_code": 200, "body": body}}) + "\n"
