"""What may be logged of an engine's refusal: its reason, without a word of the prompt, which it may quote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

#: Characters shown at most.
MOST = 200
_WORD = re.compile(r"\w+")
#: What a validation error says, beside the input that it repeats.
_SAID = re.compile(r"""'msg': (['"])(.*?)\1(?=[,}])""", re.DOTALL)
#: Words that give nothing away, so that a reason stays readable though the prompt has them too.
_COMMON = frozenset(
    _WORD.findall(
        "a an and are at be but by can cannot did does error exceed exceeds field for from got greater has have in is "
        "it input length less limit longer maximum minimum model more most must no not of on one only or output "
        "request required s should t than that the this to token tokens too use value was when which with you your"
    )
)


def reason(asked: bytes, answered: bytes) -> str:
    """The message of an error body, with `…` for each word of a text of the request; "" where there is none."""
    try:
        body, answer = msgspec.json.decode(asked), msgspec.json.decode(answered)
    except msgspec.DecodeError:
        return ""
    message = _of(answer, "message")
    names = set(body) if isinstance(body, dict) else set()
    found = [text for _, text in _SAID.findall(message)]
    if found:
        # Which field it is of stands beside it (`body.temperature`).
        field = _of(answer, "param").removeprefix("body.").partition(".")[0]
        message = (f"{field}: " if field in names else "") + "; ".join(found)
    elif "'input'" in message or "input_value" in message:
        return ""
    theirs = {word for text in _texts(body) for word in _WORD.findall(text.lower())} - _COMMON
    # Names of fields are no part of a prompt.
    theirs -= names
    shown = " ".join("…" if _quotes(word, theirs) else word for word in message.split())
    shown = re.sub(r"…( …)+", "…", shown)
    return shown if len(shown) <= MOST else shown[: MOST - 1] + "…"


def _of(answer: Any, name: str) -> str:
    """A text of an error body; "" where there is none."""
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    found = error.get(name) if isinstance(error, dict) else error if name == "message" else None
    return found if isinstance(found, str) else ""


def _quotes(word: str, theirs: set[str]) -> bool:
    # Escaped or not of the alphabet in which engines speak: a piece of something quoted.
    return not word.isascii() or "\\" in word or not theirs.isdisjoint(_WORD.findall(word.lower()))


def _texts(value: Any) -> Iterator[str]:
    """All texts of a request, token ids too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from [str(one)] if isinstance(one, int) else _texts(one)
