"""What was read from a file, as a type; what does not fit is one line that names the place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from common.errors import UsageError

T = TypeVar("T")

#: How msgspec writes "one of the keys of this mapping" in a path.
_ANY = "[...]"


def convert(raw: Any, kind: type[T], where: str, sources: Mapping[str, str] | None = None) -> T:
    """`raw` as a `kind`; `UsageError` names the file `where` and the key, or the variable of `sources` that set it."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as exc:
        raise UsageError(_line(str(exc), raw, kind, where, sources or {})) from None


def _line(text: str, raw: Any, kind: Any, where: str, sources: Mapping[str, str]) -> str:
    """`Expected `int`, got `str` - at `$.scheduler.queue_size`` as `fleet.yaml: scheduler.queue_size: …`."""
    # A key that is no text: "… - at `key` in `$.current`".
    of_key = " - at `key` in `$" in text
    what, _, at = text.partition(" - at `key` in `$" if of_key else " - at `$")
    key = _named(at.rstrip("`").lstrip("."), text, raw, kind)
    name = next((v for k, v in sources.items() if key == k or key.startswith((f"{k}[", f"{k}."))), None)
    place = f"{name} ({key})" if name else f"{where}: {key}" if key else where
    if what.startswith("Object contains unknown field"):
        field = what.split("`")[1]
        return f"{where}: unknown key '{key + '.' if key else ''}{field}'; docs/settings.md lists the keys"
    said = f"{what[0].lower()}{what[1:].replace('`', '')}"
    if of_key:
        return f"{place}: a key is no text ({said}); put it into quotes"
    if said == "expected bool, got str":
        said += "; write true or false"
    elif said.startswith("expected str") and said.endswith(("got int", "got float")):
        said += "; put it into quotes"
    return f"{place}: {said}"


def _named(key: str, text: str, raw: Any, kind: Any) -> str:
    """The path with the keys that msgspec leaves out of it: those that alone bring about the same error."""
    while _ANY in key:
        before, _, rest = key.partition(_ANY)
        path = before.split(".") if before else []
        inner = _at(raw, path)
        found = next((k for k in inner or () if _error(_with(raw, path, {k: inner[k]}), kind) == text), None)
        if found is None:
            return key
        raw = _with(raw, path, {found: inner[found]})
        key = f"{before}.{found}{rest}"
        if _ANY in rest:
            # What is further in would need the key as one step of a path; no type of ours nests mappings so.
            return key
    return key


def _error(raw: Any, kind: Any) -> str | None:
    try:
        msgspec.convert(raw, kind)
    except msgspec.ValidationError as exc:
        return str(exc)
    return None


def _at(raw: Any, path: list[str]) -> Any:
    for step in path:
        raw = raw.get(step) if isinstance(raw, dict) else None
    return raw if isinstance(raw, dict) else None


def _with(raw: Any, path: list[str], inner: Any) -> Any:
    if not path:
        return inner
    return {**raw, path[0]: _with(raw[path[0]], path[1:], inner)}
