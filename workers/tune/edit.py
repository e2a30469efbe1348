"""Writes tuned numbers into models.yaml and leaves every other byte of it as it is."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from common import new_file, plain_yaml
from common.errors import UsageError

#: Begins the comment line with the figures; an earlier one is replaced.
MARK = "# workers tune: "


def write(path: Path, model: str, values: dict[str, int], figures: str) -> None:
    """Replace `path`, whole or not at all; `UsageError` when it cannot be edited so that nothing else changes."""
    edited = with_values(_read(path), model, values, figures, str(path))
    try:
        with new_file.replacing(path) as file:
            file.write(edited.encode())
            os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
    except OSError as exc:
        raise UsageError(f"{path}: cannot be written: {exc.strerror}") from None


def fault(path: Path, model: str, names: Sequence[str]) -> str | None:
    """Why the numbers of `names` cannot be written so that nothing else changes; None: they can."""
    try:
        with_values(_read(path), model, dict.fromkeys(names, 1), "", str(path))
    except UsageError as exc:
        return str(exc)
    return None


def with_values(text: str, model: str, values: dict[str, int], figures: str, where: str = "models.yaml") -> str:
    """The text with `values` among the engine's arguments of `model`, and `figures` in a comment above its entry."""
    by_hand = f"set {' and '.join(values)} by hand"
    try:
        key, entry = _entry(plain_yaml.compose(text), model)
    except (yaml.YAMLError, KeyError):
        raise UsageError(f"{where}: the entry of {model} was not found; {by_hand}") from None
    edits = [*_engine_edits(entry, values, text), _comment(key, text, figures)]
    edited = text
    for start, end, new in sorted(edits, reverse=True):
        edited = edited[:start] + new + edited[end:]
    if _parsed(edited) != _expected(_parsed(text), model, values):
        # An anchor that others share, or a style nobody thought of.
        raise UsageError(f"{where}: the entry of {model} cannot be edited without changing others; {by_hand}")
    return edited


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path}: cannot be read: {getattr(exc, 'strerror', None) or 'is not UTF-8 text'}") from None


def _entry(root: yaml.Node | None, model: str) -> tuple[yaml.ScalarNode, yaml.MappingNode]:
    models = _child(root, "models")
    for key, value in models.value if isinstance(models, yaml.MappingNode) else ():
        if key.value == model and isinstance(value, yaml.MappingNode):
            return key, value
    raise KeyError(model)


def _child(node: yaml.Node | None, name: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for key, value in node.value if str(key.value).replace("-", "_") == name), None)


def _engine_edits(entry: yaml.MappingNode, values: dict[str, int], text: str) -> list[tuple[int, int, str]]:
    engine = _child(entry, "engine")
    flow = ", ".join(f"{name}: {value}" for name, value in values.items())
    if engine is None:
        return [_inserted(entry, [f"engine: {{{flow}}}"], text)]
    if not isinstance(engine, yaml.MappingNode):
        # `engine:` with nothing behind it.
        at = engine.start_mark.index
        return [(at, engine.end_mark.index, f" {{{flow}}}")]
    edits = []
    missing = []
    for name, value in values.items():
        there = _child(engine, name)
        if there is None:
            missing.append(f"{name}: {value}")
        else:
            edits.append((there.start_mark.index, there.end_mark.index, str(value)))
    return [*edits, _inserted(engine, missing, text)] if missing else edits


def _inserted(mapping: yaml.MappingNode, items: list[str], text: str) -> tuple[int, int, str]:
    """Items as the first of a mapping, in its own style."""
    if mapping.flow_style:
        at = text.index("{", mapping.start_mark.index) + 1
        return at, at, ", ".join(items) + (", " if mapping.value else "")
    first = mapping.value[0][0].start_mark
    return first.index, first.index, "".join(f"{item}{_break(text)}{' ' * first.column}" for item in items)


def _break(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _comment(key: yaml.ScalarNode, text: str, figures: str) -> tuple[int, int, str]:
    at = text.rfind("\n", 0, key.start_mark.index) + 1
    before = text.rfind("\n", 0, max(0, at - 1)) + 1
    start = before if text[before:at].lstrip().startswith(MARK) else at
    indent = text[at : key.start_mark.index]
    return start, at, f"{indent if indent.isspace() else ''}{MARK}{figures}{_break(text)}"


def _expected(raw: Any, model: str, values: dict[str, int]) -> Any:
    raw = copy.deepcopy(raw)
    engine = raw["models"][model].get("engine") or {}
    spelled = {key.replace("-", "_"): key for key in engine}
    raw["models"][model]["engine"] = engine | {spelled.get(name, name): value for name, value in values.items()}
    return raw


def _parsed(text: str) -> Any:
    try:
        return plain_yaml.parse(text)
    except yaml.YAMLError:
        return None
