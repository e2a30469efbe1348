"""`python -m workers`. Nothing else is defined here: a module that runs as `__main__` exists twice."""

from workers.cli import main

if __name__ == "__main__":
    main()
