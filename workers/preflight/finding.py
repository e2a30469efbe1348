"""What a check found."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One line for a person. A `problem` keeps the engine from starting, a `warning` may."""

    check: str
    level: Literal["ok", "warning", "problem"]
    text: str


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", text)


def warning(check: str, text: str) -> Finding:
    """May fail or be slow."""
    return Finding(check, "warning", text)


def problem(check: str, text: str) -> Finding:
    """Will fail."""
    return Finding(check, "problem", text)
