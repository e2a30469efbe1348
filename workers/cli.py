"""The `workers` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from common import say
from common.command import guard
from workers.cache.cli import app as cache_app
from workers.models.cli import app as models_app
from workers.preflight.cli import check
from workers.tune.cli import tune

app = typer.Typer(
    help="Batchmill's workers: engines that answer the requests of batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(models_app, name="models")
app.add_typer(cache_app, name="cache")
app.command()(check)
app.command()(tune)


@app.callback()
def root() -> None:
    """Batchmill's workers: engines that answer the requests of batches."""


@app.command()
def start(
    model: Annotated[
        str | None, typer.Option(help="Model to serve: NAME or NAME@VERSION.", show_default="the default model")
    ] = None,
    device_ids: Annotated[
        str | None, typer.Option(help="GPUs to use, such as 0,1: one worker for each group the model needs.")
    ] = None,
    all_gpus: Annotated[bool, typer.Option("--all-gpus", help="Use all GPUs of this machine.")] = False,
    engine: Annotated[str | None, typer.Option(help="vllm, or echo (no model, for tests).")] = None,
    name: Annotated[str | None, typer.Option(help="What to call this worker, in place of its device.")] = None,
    supervised: Annotated[
        bool, typer.Option("--supervisor/--no-supervisor", help="Start and watch worker processes, or be one.")
    ] = True,
    give_up_after: Annotated[
        int, typer.Option(min=0, help="End after so many failures in a row, with the worker's status; 0: never.")
    ] = 0,
) -> None:
    """Serve a model until SIGTERM: one worker process a GPU group, started again when it fails."""
    from workers import start as starting

    options = starting.Options(model, device_ids, all_gpus, engine, name, supervised, give_up_after)
    raise typer.Exit(starting.start(options))


def main() -> None:
    """Entry point: exits with the command's code (docs/cli.md); an error is one line, without a traceback."""
    say.lenient()
    argv = sys.argv[1:]
    sys.exit(guard("workers", lambda: app(argv, prog_name="workers", standalone_mode=False), argv))
