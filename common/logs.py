"""Structured logs. No prompt and no answer is ever logged: callers pass ids, counts and reasons."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from common.settings import Telemetry


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
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def get(name: str) -> Any:
    """A logger with its module's name bound."""
    return structlog.get_logger(module=name)
