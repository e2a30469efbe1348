"""The command line: `app` declares the commands, `handler` runs them, one module does each command.

`app` is all that `--help` loads; what a command needs is imported when it runs.
"""
