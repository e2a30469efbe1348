"""What a chat template makes of the time: some print today's date (`strftime_now`), so one request has another answer
tomorrow. The date then is part of the key; what is finer than a day has no key at all.

Where templates are: in the model's folder, in what the engine's arguments hold or name, and in a request's own
`chat_template`. What `strftime_now` prints is local time, of the process that renders the template: the worker's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

_NAME = "strftime_now"
#: A call with its format, whole; and the question whether there is such a function.
_CALL = re.compile(_NAME + r"""\s*\(\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\)""")
_ASKED = re.compile(_NAME + r"\s+is\s+(?:not\s+)?defined\b")
_DIRECTIVE = re.compile(r"%[-_0^#]?(.?)", re.DOTALL)
#: Directives that say nothing finer than the day, nor where on earth it is that day.
_OF_A_DAY = frozenset("aAbBCdDeFgGhjmuUVwWxyY%")
#: Files of a model's folder that may hold a template.
_FILES = ("*.jinja", "tokenizer_config.json", "processor_config.json", "chat_template*.json")
#: Bytes of such a file, at most.
_LONGEST = 32 << 20


class Clock(IntEnum):
    """How finely a template tells the time."""

    NONE = 0
    DAY = 1
    MOMENT = 2


def clock_in(template: str) -> Clock:
    """Of a template's text. What is not understood counts as `MOMENT`."""
    if _NAME not in template:
        return Clock.NONE
    formats = [double or single for double, single in _CALL.findall(template)]
    if _NAME in _ASKED.sub("", _CALL.sub("", template)):
        return Clock.MOMENT
    directives = {directive for text in formats for directive in _DIRECTIVE.findall(text)}
    return Clock.DAY if directives <= _OF_A_DAY else Clock.MOMENT


def clock_of(folder: Path, arguments: Mapping[str, Any]) -> Clock:
    """Of a model in its folder, served with these arguments of the engine. Reads files; what is not there has none."""
    texts = [text for found in (_in_folder(folder), _in_value(dict(arguments))) for text in found]
    return max(map(clock_in, texts), default=Clock.NONE)


def _in_folder(folder: Path) -> Iterator[str]:
    for pattern in _FILES:
        for path in folder.rglob(pattern):
            yield from _in_file(path)


def _in_file(path: Path) -> Iterator[str]:
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST:
            return
        data = path.read_bytes()
    except OSError:
        return
    if path.suffix == ".json":
        try:
            yield from _strings(msgspec.json.decode(data))
            return
        except (msgspec.DecodeError, UnicodeError):
            pass
    yield data.decode("utf-8", "replace")


def _in_value(value: Any) -> Iterator[str]:
    """The strings of an argument, and of the file or folder that one names."""
    for text in _strings(value):
        yield text
        if len(text) > 4096 or "\n" in text:
            continue
        try:
            path = Path(text).expanduser()
            if path.is_dir():
                yield from _in_folder(path)
            else:
                yield from _in_file(path)
        except (OSError, ValueError, RuntimeError):
            continue


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
