"""docs/settings.md names every key with the default the code has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.registry import Hardware, ModelVersion
from common.settings import Settings

DOC = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

_ROW = re.compile(r"^\| `([a-z_.]+)` \| (.*?) \| (.*?) \|$")


def documented() -> dict[str, str]:
    """Key → the default as the page writes it."""
    rows = [m for line in DOC.read_text("utf-8").splitlines() if (m := _ROW.match(line))]
    keys = [r[1] for r in rows]
    assert len(keys) == len(set(keys)), "a key is documented twice"
    return {r[1]: r[2] for r in rows}


def shown(value: Any) -> str:
    """A default as the page writes it."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float) and value == int(value):
        return f"`{int(value)}`"
    if value in ([], {}):
        return "empty"
    return f"`{value}`"


def defaults() -> dict[str, str]:
    found = {}
    for section in msgspec.structs.fields(Settings):
        for field in msgspec.structs.fields(section.type):
            found[f"{section.name}.{field.name}"] = shown(_default(field))
    for struct, prefix in ((ModelVersion, "models"), (Hardware, "models.hardware")):
        for field in msgspec.structs.fields(struct):
            if field.name != "hardware":
                value = _default(field)
                found[f"{prefix}.{field.name}"] = "required" if value is msgspec.NODEFAULT else shown(value)
    return found


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


@pytest.mark.parametrize("key", sorted(defaults()))
def test_every_key_is_documented_with_its_default(key: str) -> None:
    assert documented().get(key) == defaults()[key]


def test_no_key_is_documented_that_does_not_exist() -> None:
    other = {"default", "current", "models"}
    assert set(documented()) - set(defaults()) <= other
