"""Errors that a person can cause: one line that says what is wrong, where, and what to do.

Each carries the exit code of the commands (documented in docs/cli.md), so that the command line needs one handler.
"""

from __future__ import annotations

from common import addresses


class BatchmillError(Exception):
    """Base of all errors shown to a person without a traceback. Its text shows no password of a URL."""

    exit_code = 1

    def __str__(self) -> str:
        return addresses.plain(super().__str__())


class UsageError(BatchmillError):
    """A wrong option, setting or file: nothing was started."""

    exit_code = 2


class InvalidInput(BatchmillError):
    """The batch file has lines that cannot be accepted: nothing was enqueued."""

    exit_code = 2


class Unreachable(BatchmillError):
    """The broker, Redis or the store does not answer."""

    exit_code = 3


class Damaged(BatchmillError):
    """A file in the store is not what it must be; the text names it."""

    exit_code = 3


class StoreFull(Unreachable):
    """The store's disk or quota is full; what was being written is not there."""


class BadMessage(Exception):
    """A queue message that failed verification or its schema; `reason` is safe to log (no payload in it)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
