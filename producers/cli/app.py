"""The grammar of the command line: every command with its arguments, options and help. What they do is elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from common.grammar import Group

file_argument = click.argument(
    "file", metavar="FILE", help="JSON lines: a path, an fsspec URL, or - for stdin; .gz and .zst too."
)
id_argument = click.argument("batch_id", metavar="ID", help="A batch id (batch_…).")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout (docs/cli.md).")
model_option = click.option(
    "--model", "-m", metavar="NAME[@VERSION]", help="Else the first request's, else the default."
)


def _folder(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Path | None:
    """A folder that can be meant: `--output "$UNSET"` would fill the working folder, and `-` is no stdout here."""
    if text is None:
        return None
    if not text:
        raise click.BadParameter("is empty; name a folder")
    if text == "-":
        raise click.BadParameter("must be a folder; 'producers results ID --output -' writes to stdout")
    return Path(text)


output_option = click.option(
    "--output", "-o", metavar="DIR", callback=_folder, help="Folder of the outputs. (default: ./batchmill-out/ID)"
)
max_tokens_option = click.option(
    "--max-tokens-default",
    metavar="N",
    type=click.IntRange(min=1),
    help="max_tokens of requests that name none.",
)
detach_option = click.option("--detach", "-d", is_flag=True, help="Do not follow; come back with watch.")
timeout_option = click.option(
    "--timeout", metavar="SECONDS", type=float, help="Time one request may take in the engine."
)
key_option = click.option(
    "--idempotency-key", metavar="KEY", help="The same key again gives the same batch, not another."
)
priority_option = click.option("--priority", metavar="WORD", help="low, normal, high or urgent.")
tenant_option = click.option("--tenant", metavar="NAME", help="Whose work it is; tenants share by scheduler.tenants.")
window_option = click.option(
    "--completion-window", metavar="TIME", help="24h, 90m, …: what is unanswered then expires."
)
not_before_option = click.option(
    "--not-before", metavar="WHEN", help="Send nothing before this time (ISO), or for this long."
)
run_between_option = click.option(
    "--run-between", metavar="FROM-TO", help="Send only at these hours: '22:00-06:00 Europe/Berlin', else UTC."
)


def _show_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from common import say
        from producers.cli.surroundings import installed_version

        say.out(f"batchmill {installed_version()}")
        context.exit()


@click.group(
    name="producers",
    cls=Group,
    epilog="Exit codes: 0 all answered, 1 some requests failed, 2 invalid input or usage, 3 broker or store "
    "unreachable, 4 cancelled or expired. Settings: config/fleet.yaml and BATCHMILL_… variables.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Settings, instead of config/fleet.yaml.",
)
@click.option(
    "--models",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Model registry, instead of config/models.yaml.",
)
def app(config: Path | None, models: Path | None) -> None:
    """Offline batch inference: files of requests in, aligned files of answers out."""
    # By environment, so that the processes of an embedded fleet read the same files.
    if config is not None:
        os.environ["BATCHMILL_CONFIG"] = str(config.absolute())
    if models is not None:
        os.environ["BATCHMILL_MODELS"] = str(models.absolute())


@app.command()
@file_argument
@model_option
@click.option("--name", help="A name for people.")
@click.option("--metadata", metavar="K=V", multiple=True, help="Kept with the batch; may be given again.")
@detach_option
@output_option
@max_tokens_option
@click.option("--skip-invalid", is_flag=True, help="Bad lines become error results instead of refusing the file.")
@click.option("--cache", metavar="MODE", help="Result cache: off, read, write or on. (default: the settings')")
@timeout_option
@key_option
@priority_option
@tenant_option
@window_option
@not_before_option
@run_between_option
@json_option
def submit(file: str, metadata: tuple[str, ...], timeout: float | None, **options: Any) -> int:
    """Check a file of requests, enqueue it, follow it and put its outputs.

    Ctrl-C stops following, not the batch.
    """
    from producers.cli.submit import Wish, submit

    return submit(Wish(source=file, metadata=list(metadata), timeout_s=timeout, **options))


@app.command()
@file_argument
@model_option
@max_tokens_option
@json_option
def validate(file: str, **options: Any) -> int:
    """Check a file of requests. Needs no broker and enqueues nothing."""
    from producers.cli.validate import validate

    return validate(file, **options)


@app.command()
@file_argument
@model_option
@click.option(
    "--kv-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    help="Tokens of the KV cache. (default: by models.yaml)",
)
@click.option(
    "--block-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    help="Tokens of a block of it. (default: by models.yaml)",
)
@max_tokens_option
@json_option
def analyze(file: str, **options: Any) -> int:
    """What a file will cost: tokens, shared prefixes, duplicates, what caches save. Runs nothing, needs no GPU."""
    from producers.cli.analyze import analyze

    return analyze(file, **options)


@app.command()
@id_argument
@json_option
def status(batch_id: str, as_json: bool) -> int:
    """Where a batch stands."""
    from producers.cli.batches import status

    return status(batch_id, as_json=as_json)


@app.command()
@id_argument
@output_option
@json_option
def watch(batch_id: str, output: Path | None, as_json: bool) -> int:
    """Follow a batch until it ends, then put its outputs.

    Ctrl-C stops following, not the batch.
    """
    from producers.cli.watch import watch

    return watch(batch_id, output=output, as_json=as_json)


@app.command("list")
@click.option(
    "--limit",
    "-n",
    metavar="N",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="How many, newest first.",
)
@click.option("--all", "everything", is_flag=True, help="All of them.")
@json_option
def list_batches(limit: int, everything: bool, as_json: bool) -> int:
    """The newest batches."""
    from producers.cli.batches import show

    return show(limit=None if everything else limit, as_json=as_json)


@app.command()
@click.option("--older-than", metavar="TIME", required=True, help="How long ago they ended: 30d, 12h.")
@click.option("--dry-run", is_flag=True, help="Only name them.")
@json_option
def prune(older_than: str, dry_run: bool, as_json: bool) -> int:
    """Remove batches that ended long ago from the store, with their outputs."""
    from producers.cli.prune import prune

    return prune(older_than=older_than, dry_run=dry_run, as_json=as_json)


@app.command()
@id_argument
@json_option
def cancel(batch_id: str, as_json: bool) -> int:
    """Cancel a batch: what is answered is kept, the rest becomes error results."""
    from producers.cli.orders import cancel

    return cancel(batch_id, as_json=as_json)


@app.command()
@id_argument
@json_option
def pause(batch_id: str, as_json: bool) -> int:
    """Send nothing more of a batch for now; what was sent is still answered."""
    from producers.cli.orders import pause

    return pause(batch_id, as_json=as_json)


@app.command("resume-dispatch")
@id_argument
@json_option
def resume_dispatch(batch_id: str, as_json: bool) -> int:
    """Let a paused batch go on."""
    from producers.cli.orders import resume_dispatch

    return resume_dispatch(batch_id, as_json=as_json)


@app.command()
@id_argument
@click.option("--priority", metavar="WORD", required=True, help="low, normal, high or urgent.")
@json_option
def reprioritize(batch_id: str, priority: str, as_json: bool) -> int:
    """Give a batch that runs another priority."""
    from producers.cli.orders import reprioritize

    return reprioritize(batch_id, priority=priority, as_json=as_json)


@app.command()
@id_argument
@detach_option
@output_option
@click.option("--merged", is_flag=True, help="Put the outputs of all, the earlier answers with the new ones.")
@click.option("--name", help="A name for people. (default: as it was)")
@timeout_option
@key_option
@priority_option
@tenant_option
@window_option
@not_before_option
@run_between_option
@json_option
def retry(
    batch_id: str,
    detach: bool,
    output: Path | None,
    merged: bool,
    as_json: bool,
    timeout: float | None,
    **options: Any,
) -> int:
    """Enqueue again what is unanswered of a batch that has ended (failed, expired, cancelled requests), and follow it.

    Doing so twice gives the same new batch. Its deadline and its hours are not taken over.
    """
    from producers.cli.retry import Wish, retry
    from producers.intake import Options

    return retry(Wish(batch_id, detach, output, merged, Options(timeout_s=timeout, **options), as_json))


@app.command()
@click.option("--detach", "-d", is_flag=True, help="See to a fleet and do not follow.")
@click.option(
    "--output",
    "-o",
    metavar="DIR",
    callback=_folder,
    help="Folder of the folders ID. (default: ./batchmill-out)",
)
@json_option
def resume(detach: bool, output: Path | None, as_json: bool) -> int:
    """After a crash: say what is unfinished, bring the fleet back where it is the embedded one, and follow.

    May be run at any time, and again.
    """
    from producers.cli.resume import resume

    return resume(detach=detach, output=output, as_json=as_json)


@app.command()
@id_argument
@click.option("--output", "-o", metavar="DIR", help="Folder; - for all lines on stdout. (default: ./batchmill-out/ID)")
@click.option("--partial", is_flag=True, help="What is answered so far, while it runs.")
@click.option("--merged", is_flag=True, help="Of a retry: with the answers of the batch that it retries.")
@json_option
def results(batch_id: str, output: str | None, partial: bool, merged: bool, as_json: bool) -> int:
    """Put the outputs of a batch."""
    from producers.cli.results import results

    return results(batch_id, output=output, partial=partial, merged=merged, as_json=as_json)


@app.command()
@click.option(
    "--shard",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="The shard of batches to run.",
)
def coordinate(shard: int) -> int:
    """Run a coordinator: dispatches batches, collects and logs results, writes the outputs. SIGTERM ends it cleanly."""
    from producers.cli.coordinate import coordinate

    return coordinate(shard)


@app.group()
def fleet() -> None:
    """The embedded fleet: broker, coordinator and worker on this machine, used when no broker is configured."""


@fleet.command("up")
@model_option
@json_option
def fleet_up(model: str | None, as_json: bool) -> int:
    """Bring it up, to stay until `fleet down`, and wait until the model is ready."""
    from producers.cli.fleet import up

    return up(model=model, as_json=as_json)


@fleet.command("down")
@click.option("--now", is_flag=True, help="Do not let workers finish what they run.")
@json_option
def fleet_down(now: bool, as_json: bool) -> int:
    """End it. Unfinished batches wait in the store."""
    from producers.cli.fleet import down

    return down(now=now, as_json=as_json)


@fleet.command("status")
@json_option
def fleet_status(as_json: bool) -> int:
    """What runs, and where its logs are. Exit code 3 when none runs."""
    from producers.cli.fleet import show

    return show(as_json=as_json)
