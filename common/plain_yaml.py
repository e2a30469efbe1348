"""YAML as settings are written in it: a key stands once, a number is one, and `off` is a word.

Plain words and numbers are read by the core schema of YAML 1.2 (yaml.org/spec/1.2.2, 10.3.2). PyYAML has that of
1.1, which takes `off`, `on`, `yes` and `no` for booleans, `1:30` for ninety, `010` for eight and `2026-01-01` for a
date.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

_PREFIX = "tag:yaml.org,2002:"
#: What stands for what when it is written plainly, and what each begins with.
_PLAIN: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


def _resolve_plainly(of: Any) -> None:
    for name, pattern, first in _PLAIN:
        begins = [*first, *([""] if name == "null" else [])]
        of.add_implicit_resolver(f"{_PREFIX}{name}", re.compile(rf"(?:{pattern})\Z"), begins)


class _Loader(yaml.SafeLoader):
    """Refuses what YAML allows and nobody means in settings; the error's mark says where."""

    # None of those of YAML 1.1 but the key `<<`, which is of no schema and is used in settings.
    yaml_implicit_resolvers = {"<": [(f"{_PREFIX}merge", re.compile(r"<<\Z"))]}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        # Before merge keys (`<<`) are put in: what is named here stands above what is merged.
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{_PREFIX}merge":
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key '{key.value}' is given twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def whole(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        try:
            # `010` is ten.
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        except ValueError:
            raise _no_number(node) from None

    def finite(self, node: yaml.ScalarNode) -> float:
        try:
            number = self.construct_yaml_float(node)
        except ValueError:
            raise _no_number(node) from None
        if not math.isfinite(number):
            raise _no_number(node)
        return number


_resolve_plainly(_Loader)
_Loader.add_constructor(f"{_PREFIX}int", _Loader.whole)
_Loader.add_constructor(f"{_PREFIX}float", _Loader.finite)


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 would take for something else, so that readers of either agree."""


_resolve_plainly(_Dumper)


def parse(text: str) -> Any:
    """What a YAML document holds; `yaml.YAMLError`, also for a key given twice, `.nan` and `.inf`."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def compose(text: str) -> yaml.Node | None:
    """The document's nodes, with their places in the text; `yaml.YAMLError`."""
    return yaml.compose(text, _Loader)


def dump(value: Any) -> str:
    """A document that `parse` reads as `value`, keys in order of the alphabet."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=True)


def _no_number(node: yaml.ScalarNode) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, f"{node.value[:80]} is not a number", node.start_mark)
