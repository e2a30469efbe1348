"""Exit codes of the commands; docs/cli.md explains them to users."""

from __future__ import annotations

from typing import Final

ANSWERED: Final = 0
SOME_FAILED: Final = 1
INVALID: Final = 2
UNREACHABLE: Final = 3
STOPPED: Final = 4
#: A defect of ours (sysexits.h: EX_SOFTWARE).
BUG: Final = 70
#: Another coordinator leads now; starting again makes a standby (sysexits.h: EX_TEMPFAIL).
OUSTED: Final = 75
#: Ctrl-C: what was followed goes on. 128 + SIGINT, so that `producers submit … && next step` does not go on.
DETACHED: Final = 130
#: The reader of our output went away. 128 + SIGPIPE.
PIPE_CLOSED: Final = 141


def of_batch(status: str, failed: int) -> int:
    """The code of a batch that has ended, by its final status and how many requests have no answer."""
    if status in ("cancelled", "expired"):
        return STOPPED
    return SOME_FAILED if failed or status == "failed" else ANSWERED
