"""YAML as settings are written in it: a key stands once, a number is one."""

from __future__ import annotations

import math
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Refuses what YAML allows and nobody means in settings; the error's mark says where."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        # Before merge keys (`<<`) are put in: what is named here stands above what is merged.
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key '{key.value}' is given twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def finite(self, node: yaml.ScalarNode) -> float:
        number = self.construct_yaml_float(node)
        if not math.isfinite(number):
            raise yaml.constructor.ConstructorError(None, None, f"{node.value} is not a number", node.start_mark)
        return number


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.finite)


def parse(text: str) -> Any:
    """What a YAML document holds; `yaml.YAMLError`, also for a key given twice, `.nan` and `.inf`."""
    return yaml.load(text, _Loader)
