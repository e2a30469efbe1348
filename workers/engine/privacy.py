"""Keep prompts and answers out of vLLM's log lines.

Request logging is off, but some of vLLM's error lines carry the text of an exception, and that may quote a prompt; and
an engine that crashes dumps the tokens it was working on.
"""

from __future__ import annotations

import logging
import time

#: Loggers of the code that handles request contents.
_CONTENT = (
    "vllm.entrypoints",
    "vllm.renderers",
    "vllm.parser",
    "vllm.reasoning",
    "vllm.tool_parsers",
    "vllm.inputs",
    "vllm.tokenizers",
)
_DUMPS = "vllm.logging_utils.dump_input"


#: Seconds between two lines from the same place: a file of bad requests must not fill the log, each has its result.
_EVERY_S = 60.0


class ContentFilter(logging.Filter):
    """Reduces what may quote a request to the kind of error and the place in the code, once a minute a place."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == _DUMPS:
            return False
        if record.levelno >= logging.WARNING and record.name.startswith(_CONTENT):
            place, now = (record.pathname, record.lineno), time.monotonic()
            if now - self._last.get(place, -_EVERY_S) < _EVERY_S:
                return False
            self._last[place] = now
            error = record.exc_info[1] if record.exc_info else None
            kind = f" ({type(error).__name__})" if error is not None else ""
            record.msg = f"{record.funcName} at {record.filename}:{record.lineno}{kind}; text left out"
            record.args = ()
            record.exc_info = record.exc_text = record.stack_info = None
        return True


def guard_logs() -> None:
    """Put the filter on vLLM's handlers in this process; may be called again."""
    for handler in logging.getLogger("vllm").handlers:
        if not any(isinstance(f, ContentFilter) for f in handler.filters):
            handler.addFilter(ContentFilter())
