"""`python -m common.flower [Flower's options]`: Flower on the configured fleet, or on this user's embedded one."""

from __future__ import annotations

import importlib.util
import sys

from common.errors import BatchmillError, UsageError


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
    app.start(["flower", *sys.argv[1:]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
