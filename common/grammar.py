"""What the grammars of both commands have in common, on top of click.

click and not typer, which since 0.29 reads every option by a pydantic adapter: with what that imports, a quarter of the
time of a short command.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import click

from common import say


class Group(click.Group):
    """Commands in the order in which they are declared; without any, their help and an error."""

    #: Groups inside are of this class too.
    group_class = type

    def __init__(self, *args: Any, **attrs: Any) -> None:
        super().__init__(*args, **{"no_args_is_help": False} | attrs)
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """As declared, so that what is used most comes first."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`UsageError` where there is nothing to parse."""
        if not args:
            say.out(ctx.get_help())
            raise click.UsageError("a command is missing", ctx)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each command with its whole first paragraph, which click would cut."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, " ".join(_first_paragraph(self.commands[name]).split())) for name in self.list_commands(ctx)]
            )


def _first_paragraph(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "").partition("\n\n")[0]


def invoke(command: click.Command, name: str, argv: Sequence[str]) -> Any:
    """What the command that `argv` names returns, or the code that it exits with; its errors go through.

    `click.Command.main` would end the process itself for some of them.
    """
    try:
        with command.make_context(name, list(argv)) as context:
            return command.invoke(context)
    except click.exceptions.Exit as exc:
        return exc.exit_code
