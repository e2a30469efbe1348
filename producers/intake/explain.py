"""Why a line is refused, in words for the person who wrote it; nothing of prompts is ever in them."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

#: Bytes of a custom id, as JSON.
MAX_CUSTOM_ID = 1024
#: Objects and arrays inside one another; Python's own JSON parser, which engines use, ends below 1,000.
MAX_DEPTH = 200

_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Refused(Exception):
    """A line that is no valid request. `custom_id`: its JSON string literal, None where it has none to be used."""

    def __init__(self, field: str, reason: str, custom_id: bytes | None = None) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.custom_id = custom_id


_KINDS = {
    bool: "true or false",
    type(None): "null",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}
_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "null": "null",
    "array": "an array",
    "object": "an object",
}
_AT_LEAST = re.compile(r"^Expected `int`(?: \| null)? >= (\d+)$")
_AT_MOST = re.compile(r"^Expected `int`(?: \| null)? <= (\d+)$")
_EXPECTED = re.compile(r"^Expected `([^`]+)`, got `([^`]+)`$")
_MISSING = re.compile(r"^Object missing required field `([^`]+)`$")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


def kind(value: object) -> str:
    """What a decoded value is."""
    return _KINDS[type(value)]


def shown(text: str) -> str:
    """A name out of the file, bounded."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def check_utf8(line: bytes) -> None:
    """`Refused` for bytes that are not UTF-8, and for the surrogates that some encoders put there."""
    try:
        line.decode()
    except UnicodeDecodeError as exc:
        raise Refused("", f"is not UTF-8 (byte {exc.start})") from None


def depth(line: bytes) -> int:
    """How deep objects and arrays stand inside one another, in a line that is JSON."""
    # Here, as such lines are rare.
    import numpy as np

    marks = np.frombuffer(_STRING.sub(b"", line), np.uint8)
    opened = ((marks == ord("{")) | (marks == ord("["))).astype(np.int64)
    closed = (marks == ord("}")) | (marks == ord("]"))
    return int(np.cumsum(opened - closed).max(initial=0))


def repeats_key(line: bytes, body: bytes, key: str) -> bool:
    """True when a key stands twice in the object that a line is; `body`: the value in it that need not be looked at."""
    last: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        # The line's own object is the last one whose end the parser comes to.
        last[:] = [name for name, _ in pairs]

    json.loads(line.replace(body, b"0", 1), object_pairs_hook=note)
    return last.count(key) > 1


def explain(exc: Exception, where: str = "") -> tuple[str, str]:
    """Field and reason, out of an exception of msgspec; never any of the content."""
    if isinstance(exc, RecursionError):
        return where, f"is nested deeper than {MAX_DEPTH} levels"
    what, _, at = str(exc).partition(" - at `$")
    path = at.rstrip("`").lstrip(".")
    field = f"{where}.{path}".strip(".")
    if missing := _MISSING.match(what):
        return f"{field}.{missing[1]}".lstrip("."), "is missing"
    if found := _EXPECTED.match(what):
        wanted = [_NAMES.get(name, name) for name in found[1].split(" | ") if name != "null"]
        return field, f"must be {' or '.join(wanted)}, is {_NAMES.get(found[2], found[2])}"
    if found := _AT_LEAST.match(what):
        return field, f"must be at least {found[1]}"
    if found := _AT_MOST.match(what):
        return field, f"must be at most {found[1]}"
    if what.startswith("Expected `array` of length >= 1"):
        return field, "must not be empty"
    if isinstance(exc, msgspec.ValidationError):
        return field, what[0].lower() + what[1:].replace("`", "")
    if what == "Input data was truncated":
        return field, "is not valid JSON: it ends in the middle"
    return field, f"is not valid JSON: {what.removeprefix('JSON is malformed: ')}"


def explain_body(body: msgspec.Raw, exc: Exception, custom_id: bytes) -> Refused:
    """Why a body whose line could be read cannot be."""
    field, reason = explain(exc, "body")
    if field.endswith("[...]"):
        # Out of a number's range, somewhere; of a whole that is decoded without a type, msgspec does not say where.
        field = "body"
        for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
            try:
                _decode_any(value)
            except msgspec.DecodeError:
                field = f"body.{name[:80]}"
                break
    return Refused(field, reason, custom_id)


def explain_line(line: bytes, exc: Exception) -> Refused:
    """Why a line could not be read, with its custom id where there is one."""
    field, reason = explain(exc)
    custom_id = None
    if isinstance(exc, msgspec.ValidationError):
        try:
            whole = _decode_any(line)
        except (msgspec.DecodeError, RecursionError):
            whole = None
        found = whole.get("custom_id") if isinstance(whole, dict) else None
        if isinstance(found, str):
            literal = _encode(found)
            custom_id = literal if 3 <= len(literal) <= MAX_CUSTOM_ID + 2 else None
        elif field == "custom_id" and isinstance(found, int | float):
            reason += "; put it in quotes"
    elif isinstance(exc, msgspec.DecodeError):
        # Python's own parser takes two things that are no JSON; when it can read the line, it is one of these.
        constants: list[str] = []
        try:
            json.loads(line, parse_constant=constants.append)
        except (ValueError, RecursionError):
            if b"\r" in line.strip():
                reason += " (lines must end with \\n or \\r\\n, not with \\r alone)"
        else:
            if constants:
                reason = f"is not valid JSON: {constants[0]} is no JSON number"
            elif _SURROGATE.search(line):
                reason = "holds half of a surrogate pair (\\ud800 to \\udfff), which is no Unicode text"
    return Refused(field, reason, custom_id)
