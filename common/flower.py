"""`python -m common.flower [Flower's options]`: Flower on the configured fleet, or on this user's embedded one."""

from __future__ import annotations

import errno
import importlib.util
import sys

from common.errors import BatchmillError, UsageError

#: What a port that cannot be had is called.
_NO_PORT = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)


def main() -> int:
    """Run Flower until SIGTERM; a person's mistake is one line."""
    try:
        from common.celery_app import app
    except BatchmillError as exc:
        sys.stderr.write(f"flower: error: {exc}\n")
        return exc.exit_code
    if importlib.util.find_spec("flower") is None:
        sys.stderr.write("flower: error: Flower is not installed; pip install 'batchmill[flower]'\n")
        return UsageError.exit_code
    try:
        app.start(["flower", *sys.argv[1:]])
    except OSError as exc:
        if exc.errno not in _NO_PORT:
            raise
        sys.stderr.write(f"flower: error: cannot listen: {exc.strerror}; FLOWER_PORT or --port names another port\n")
        return UsageError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
