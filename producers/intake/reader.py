"""Lines out of blocks. Only `\\n` ends a line; a `\\r` before it is JSON whitespace; U+2028 and its like do not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

#: Times the longest line that is taken, from which on a line without an end is not read any further.
ENDLESS = 64


class Lines(NamedTuple):
    """Consecutive lines without their line ends."""

    #: None stands for a line that is longer than allowed; its bytes were let go.
    lines: list[bytes | None]
    #: All of them are UTF-8; False: at least one is not.
    utf8: bool
    #: The last one is so long that nothing after it was read: this is no file of lines.
    endless: bool = False


def read_lines(blocks: Iterable[bytes], longest: int) -> Iterator[Lines]:
    """The lines of a stream of blocks, in order, some at a time; a last line need not end.

    `longest`: bytes a line may have. Never more than that and two blocks are held.
    """
    # What was read of a line that has not ended: joined only when it does, or every block would copy it again.
    parts: list[bytes] = []
    held = 0
    skipping = False
    for block in blocks:
        cut = block.rfind(b"\n")
        if cut < 0:
            if not skipping:
                parts.append(block)
                held += len(block)
                if held > longest + 1:
                    parts.clear()
                    skipping = True
            else:
                held += len(block)
                if held > ENDLESS * longest:
                    yield Lines([None], True, endless=True)
                    return
            continue
        if parts:
            parts.append(block[:cut])
            whole = b"".join(parts)
        else:
            whole = block[:cut]
        lines: list[bytes | None] = list(whole.split(b"\n"))
        if skipping:
            # `whole` starts with the rest of the line that is being left out.
            lines[0] = None
        parts, held, skipping = [], 0, False
        if cut + 1 < len(block):
            parts.append(block[cut + 1 :])
            held = len(parts[0])
        yield Lines(_bounded(lines, longest) if len(whole) > longest else lines, _is_utf8(whole))
    if skipping:
        yield Lines([None], True)
    elif parts:
        whole = b"".join(parts)
        yield Lines(_bounded([whole], longest), _is_utf8(whole))


def _bounded(lines: list[bytes | None], longest: int) -> list[bytes | None]:
    # A `\r` that belongs to the line end does not count.
    for n, line in enumerate(lines):
        if line is not None and len(line) > longest and len(line) - line.endswith(b"\r") > longest:
            lines[n] = None
    return lines


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
