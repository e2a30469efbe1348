"""The `workers` command."""

from __future__ import annotations

import sys

import click

from common import say
from common.command import guard
from common.grammar import Group, invoke
from workers.cache.cli import app as cache_app
from workers.models.cli import app as models_app
from workers.preflight.cli import check
from workers.tune.cli import tune


@click.group(name="workers", cls=Group)
def app() -> None:
    """Batchmill's workers: engines that answer the requests of batches."""


@app.command()
@click.option("--model", help="Model to serve: NAME or NAME@VERSION.", show_default="the default model")
@click.option("--device-ids", help="GPUs to use, such as 0,1: one worker for each group the model needs.")
@click.option("--all-gpus", is_flag=True, help="Use all GPUs of this machine.")
@click.option("--engine", help="vllm, or echo (no model, for tests).")
@click.option("--name", help="What to call this worker, in place of its device.")
@click.option(
    "--supervisor/--no-supervisor",
    "supervised",
    default=True,
    show_default=True,
    help="Start and watch worker processes, or be one.",
)
@click.option(
    "--give-up-after",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="End after so many failures in a row, with the worker's status; 0: never.",
)
def start(
    model: str | None,
    device_ids: str | None,
    all_gpus: bool,
    engine: str | None,
    name: str | None,
    supervised: bool,
    give_up_after: int,
) -> None:
    """Serve a model until SIGTERM: one worker process a GPU group, started again when it fails."""
    from workers import start as starting

    options = starting.Options(model, device_ids, all_gpus, engine, name, supervised, give_up_after)
    raise click.exceptions.Exit(starting.start(options))


app.add_command(models_app)
app.add_command(cache_app)
app.add_command(check)
app.add_command(tune)


def main() -> None:
    """Entry point: exits with the command's code (docs/cli.md); an error is one line, without a traceback."""
    say.lenient()
    argv = sys.argv[1:]
    sys.exit(guard("workers", lambda: invoke(app, "workers", argv), argv))
