"""`producers ARGV…` as a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.command import guard
from common.grammar import invoke
from common.interrupts import terminated_like_interrupted


def run(argv: Sequence[str]) -> int:
    """The exit code of `producers ARGV…`; never raises."""
    from producers.cli.app import app

    def call() -> Any:
        with terminated_like_interrupted():
            return invoke(app, "producers", argv)

    return guard("producers", call, argv)
