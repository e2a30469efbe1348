"""The `producers` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code (docs/cli.md lists them)."""
    from common import collector

    collector.seldom()
    from common import say
    from producers.cli.handler import run

    say.lenient()
    code = run(sys.argv[1:])
    collector.keep()
    sys.exit(code)


if __name__ == "__main__":
    main()
