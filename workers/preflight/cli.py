"""`workers check`: everything that can be known before an engine is started."""

from __future__ import annotations

import click

from common import registry as registries
from common import say
from common import settings as setting_files
from common.errors import UsageError


@click.command()
@click.option("--model", help="Model to check for: NAME or NAME@VERSION.", show_default="the default model")
@click.option("--full", is_flag=True, help="Read the weights and compare their digest.")
@click.option("--json", is_flag=True, help="Print JSON on stdout.")
def check(model: str | None, full: bool, json: bool) -> None:
    """Check whether this machine can serve a model: vLLM, model files, devices, memory. Exit code 2 on a problem."""
    from workers.engine.vllm import set_environment
    from workers.preflight.checks import check_all

    settings, registry = setting_files.load(), registries.load()
    name = registry.resolve(model or settings.inference.default_model)
    set_environment(settings)
    found = check_all(name, registry.get(name), settings, registry.where, full=full)
    if json:
        say.json(found)
    else:
        for one in found:
            say.out(f"{one.level:<8} {one.check:<8} {one.text}")
    if any(one.level == "problem" for one in found):
        raise click.exceptions.Exit(UsageError.exit_code)
