"""Runs a command and turns whatever comes out of it into an exit code and, for errors, one line on stderr."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from common import exits, say
from common.errors import BatchmillError

#: Set to 1, errors show their traceback.
DEBUG = "BATCHMILL_DEBUG"
#: What a machine refuses its users: theirs to mend, and no defect of ours.
_REFUSALS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO),
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EMFILE, errno.ENFILE),
}


def guard(name: str, call: Callable[[], Any], argv: Sequence[str] = ()) -> int:
    """Run `call`; its int is the exit code, None is 0, an exception is told in one line. `argv`: what it parses."""
    try:
        code = call()
    except say.PipeClosed:
        return exits.PIPE_CLOSED
    except KeyboardInterrupt:
        say.err("")
        return exits.DETACHED
    except BatchmillError as exc:
        return _tell(name, str(exc), exc.exit_code)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else exits.BUG
    except Exception as exc:
        if isinstance(exc, OSError) and (told := _of_stdout(name, exc)) is not None:
            return told
        if isinstance(exc, OSError) and exc.errno in _REFUSALS:
            where = "this machine" if exc.filename is None else os.fsdecode(exc.filename)
            return _tell(name, f"{where}: {exc.strerror}; put that right and run it again", exits.UNREACHABLE)
        if isinstance(exc, FileNotFoundError) and _nowhere():
            return _tell(name, "the working folder has gone; change into one that is there", exits.INVALID)
        usage = getattr(exc, "format_message", None)
        if usage is not None:  # the parser's own errors: an unknown option, a missing argument, no command at all
            said = _sentence(usage())
            return _tell(name, f"{said} (see {_help_of(exc, name, argv)})", exits.INVALID)
        _tell(name, f"unexpected {type(exc).__name__}: {exc}; this is a bug", exits.BUG)
        if os.environ.get(DEBUG) != "1":
            say.err(f"{name}: set {DEBUG}=1 and run it again to see the traceback")
        return exits.BUG
    return code if isinstance(code, int) else exits.ANSWERED


def _of_stdout(name: str, exc: OSError) -> int | None:
    """The code where stdout is what failed under the parser, whose `--help` does not pass through `say`."""
    at = exc.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None or at.tb_frame.f_globals.get("__name__", "").partition(".")[0] != "click":
        return None
    try:
        say.unwritten(exc)
    except say.PipeClosed:
        return exits.PIPE_CLOSED
    except BatchmillError as told:
        return _tell(name, str(told), told.exit_code)


def _tell(name: str, message: str, code: int) -> int:
    if os.environ.get(DEBUG) == "1":
        import traceback

        traceback.print_exc(file=sys.stderr)
    say.err(f"{name}: error: {' '.join(message.split())}")
    return code


def _nowhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _sentence(text: str) -> str:
    return text[:1].lower() + text[1:].rstrip(".")


def _help_of(exc: Exception, name: str, argv: Sequence[str]) -> str:
    context = getattr(exc, "ctx", None)
    if context is not None:
        return f"{context.command_path} --help"
    # An option without its value: the parser does not say of which command, and no option stands before that.
    return f"{name} {argv[0]} --help" if argv and argv[0].isalpha() else f"{name} --help"
