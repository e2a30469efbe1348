"""The planned rows of a batch, as both sides know them: `rows` and `plan` in the batch's folder.

`rows` holds the MessagePack `Row`s in planned order, one after the other; `plan` one record a position: where its row
starts, how long it is, its index, its cost in tokens, and how many bytes of its prompt it has in common with the row
before it, beyond what all of its window have. `producers.plan_file` writes them, `common.plan_reader` reads them.
"""

from __future__ import annotations

import struct

import msgspec

ROWS = "rows"
PLAN = "plan"

#: A record of `plan`: offset, length, index, cost, shared (`plan_reader.PLAN_DTYPE`).
PLAN_RECORD = struct.Struct("<QIIII")


class Window(msgspec.Struct, array_like=True, frozen=True):
    """A stretch that was planned as a whole.

    Positions `[pos_start, pos_end)` hold exactly the valid rows of indexes `[index_start, index_end)`: order is changed
    only inside a window, so every step that needs both orders works on one window at a time.
    """

    pos_start: int
    pos_end: int
    index_start: int
    index_end: int
