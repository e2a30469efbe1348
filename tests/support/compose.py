"""docker-compose.gpu.yml and docker/Dockerfile as data, for tests that check them or run their commands bare."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.gpu.yml"
DOCKERFILE = ROOT / "docker" / "Dockerfile"

_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\})")


def compose() -> dict[str, Any]:
    """The compose file with its YAML merges done; variables stand as written."""
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text("utf-8"))
    return loaded


def interpolate(text: str, env: Mapping[str, str]) -> str:
    """What compose makes of a value: `${NAME:-default}` from `env`, `$$` as `$`."""

    def value(match: re.Match[str]) -> str:
        name = match["name"]
        return "$" if name is None else env.get(name) or match["default"] or ""

    return _VARIABLE.sub(value, text)


def stages() -> dict[str, list[str]]:
    """Stage → the Dockerfile's instructions in effect at its end, those of the stages it builds on first."""
    joined = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text("utf-8"))
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in joined.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("FROM "):
            _, base, _, name = line.split()
            current = found[name] = list(found.get(base, []))
        else:
            current.append(line)
    return found


def environment(stage: str) -> dict[str, str]:
    """The `ENV` of a stage."""
    pairs = [w for line in stages()[stage] if line.startswith("ENV ") for w in line[4:].split()]
    return dict(p.split("=", 1) for p in pairs)
