"""What goes to the two streams: results to stdout, everything else to stderr.

All output passes here, so that a reader that goes away (`producers list | head -1`) ends a command quietly, and a
closed stderr never ends one that is at work.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from common import addresses
from common.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class PipeClosed(Exception):
    """Nobody reads stdout any more."""


def lenient() -> None:
    """Let words end no command: a closed stderr takes everything, stdout escapes what its encoding lacks.

    A closed stdout takes nothing: whoever has an answer for it must not think that it was given.
    """
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or not stream.encoding.startswith("utf")):
        stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _stdout() -> Iterator[None]:
    """`PipeClosed` when nobody reads stdout, `UsageError` when it cannot be written (a file on a full disk)."""
    try:
        yield
    except OSError as exc:
        unwritten(exc)


def unwritten(exc: OSError) -> NoReturn:
    """Nothing more goes to stdout, which failed: `PipeClosed` or `UsageError`."""
    _silence(sys.stdout)
    if isinstance(exc, BrokenPipeError):
        raise PipeClosed from None
    why = "it is closed" if exc.errno == errno.EBADF else exc.strerror or exc
    raise UsageError(f"standard output cannot be written: {why}") from None


def out(text: str) -> None:
    """One or more lines to stdout; `PipeClosed` when nobody reads it."""
    with _stdout():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def raw(data: bytes) -> None:
    """Bytes to stdout as they are; `PipeClosed` when nobody reads it."""
    with _stdout():
        sys.stdout.buffer.write(data)


class Raw:
    """Stdout as a file of bytes that can be written to."""

    def write(self, data: bytes, /) -> None:
        """As `raw`."""
        raw(data)


def flush() -> None:
    """Write out what `raw` left buffered."""
    with _stdout():
        sys.stdout.buffer.flush()


def err(text: str) -> None:
    """A line to stderr; a URL in it shows no password."""
    try:
        sys.stderr.write(addresses.plain(text) + "\n")
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


def json(value: Any) -> None:
    """One JSON document to stdout, indented on a terminal, on one line elsewhere."""
    from json import dumps

    import msgspec

    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError:  # a folder whose name is not UTF-8: escaped, as Python's own json does it
        data = dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()
    if sys.stdout.isatty():
        data = msgspec.json.format(data, indent=2)
    out(data.decode())


def console(*, stderr: bool = False) -> Console:
    """A rich console on one of the streams, 80 columns wide where there is no terminal to ask."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _columns(), highlight=False, soft_wrap=False)


def render(what: RenderableType, *, width: int | None = None) -> None:
    """A rich table or text to stdout, with colours only on a terminal; as wide as that, or as `width`."""
    screen = console()
    if width is not None:
        screen.width = width
    # At the end of a capture rich writes the nothing that is left: an error for a file on a full disk.
    with _stdout(), screen.capture() as captured:
        screen.print(what)
    out("\n".join(line.rstrip() for line in captured.get().splitlines()))


def quiet(_text: str) -> None:
    """Takes what `err` would show."""


def sink(silent: bool) -> Callable[[str], None]:
    """`err`, or `quiet`."""
    return quiet if silent else err


def _columns() -> int:
    try:
        return max(40, int(os.environ.get("COLUMNS", "80")))
    except ValueError:
        return 80


def _silence(stream: Any) -> None:
    # The interpreter flushes the stream once more at exit and would complain there.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
