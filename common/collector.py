"""Python's cycle collector in processes whose work is streams of plain bytes.

It looks at what was made lately every 700 new containers, and now and then at all there is: in processes that make
thousands of short-lived objects a second beside some hundred thousand that stay (imported modules), that was a fifth
of the CPU time of intake. What stays is told apart once, and the looks become rare; reference counts free all else.
"""

from __future__ import annotations

import gc

#: New containers until the youngest are looked at, and looks of a generation until the next one's turn.
_THRESHOLDS = (20_000, 20, 50)


def seldom() -> None:
    """Call it first of all: a process that starts makes little but what stays."""
    gc.set_threshold(*_THRESHOLDS)


def keep() -> None:
    """What there is by now is taken to stay, and looked at no more: at the start of a long stream, and at the end of a
    process, whose last look would be at all of it.
    """
    gc.freeze()


def settle() -> None:
    """Both, once a process has started that is to stay for long: what is garbage by then goes first."""
    gc.collect()
    keep()
    seldom()
