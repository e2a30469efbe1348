"""Structured logs. No prompt and no answer is ever logged: callers pass ids, counts and reasons."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from common import addresses
from common.errors import BatchmillError
from common.settings import Telemetry


class _Formatter(logging.Formatter):
    """Of what libraries log: without passwords of URLs."""

    def format(self, record: logging.LogRecord) -> str:
        return addresses.plain(super().format(record))


def configure(telemetry: Telemetry, role: str) -> None:
    """Log to stderr, as lines for people or as JSON, with the role bound."""
    level = getattr(logging, telemetry.log_level.upper())
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if telemetry.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            lambda _logger, _method, event: {"role": role, **event},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
            lambda _logger, _method, line: addresses.plain(str(line)),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def get(name: str) -> Any:
    """A logger with its module's name bound."""
    return structlog.get_logger(module=name)


def why(exc: BaseException) -> str:
    """What a line may say of an error: its kind, and its text where that was written for people or by the system.

    Any other error's text stays out: it may quote what somebody asked.
    """
    kind = type(exc).__name__
    if isinstance(exc, BatchmillError):
        return f"{kind}: {exc}"
    if isinstance(exc, OSError) and exc.strerror:
        return f"{kind}: {exc.strerror}" + (f": {exc.filename}" if exc.filename is not None else "")
    return kind
