"""The grammar of the command line: every command with its arguments, options and help. What they do is elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="producers",
    help="Offline batch inference: files of requests in, aligned files of answers out.",
    epilog="Exit codes: 0 all answered, 1 some requests failed, 2 invalid input or usage, 3 broker or store "
    "unreachable, 4 cancelled or expired. Settings: config/fleet.yaml and BATCHMILL_… variables.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
fleet_app = typer.Typer(
    help="The embedded fleet: broker, coordinator and worker on this machine, used when no broker is configured.",
    no_args_is_help=True,
)
app.add_typer(fleet_app, name="fleet")

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="JSON lines: a path, an fsspec URL, or - for stdin; .gz and .zst too.")
]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="A batch id (batch_…).")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout (docs/cli.md).")]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME[@VERSION]", help="Else the first request's, else the default."),
]


def _folder(text: str) -> Path:
    """A folder that can be meant: `--output "$UNSET"` would fill the working folder, and `-` is no stdout here."""
    if not text:
        raise typer.BadParameter("is empty; name a folder")
    if text == "-":
        raise typer.BadParameter("must be a folder; 'producers results ID --output -' writes to stdout")
    return Path(text)


OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="DIR", parser=_folder, help="Folder of the outputs. (default: ./batchmill-out/ID)"
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens-default", metavar="N", min=1, help="max_tokens of requests that name none."),
]

DetachOption = Annotated[bool, typer.Option("--detach", "-d", help="Do not follow; come back with watch.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", help="Time one request may take in the engine."),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--idempotency-key", metavar="KEY", help="The same key again gives the same batch, not another."),
]
PriorityOption = Annotated[
    str | None,
    typer.Option("--priority", metavar="WORD", help="low, normal, high or urgent."),
]
TenantOption = Annotated[
    str | None,
    typer.Option("--tenant", metavar="NAME", help="Whose work it is; tenants share by scheduler.tenants."),
]
WindowOption = Annotated[
    str | None,
    typer.Option("--completion-window", metavar="TIME", help="24h, 90m, …: what is unanswered then expires."),
]
NotBeforeOption = Annotated[
    str | None,
    typer.Option("--not-before", metavar="WHEN", help="Send nothing before this time (ISO), or for this long."),
]
RunBetweenOption = Annotated[
    str | None,
    typer.Option(
        "--run-between", metavar="FROM-TO", help="Send only at these hours: '22:00-06:00 Europe/Berlin', else UTC."
    ),
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Settings, instead of config/fleet.yaml."),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option("--models", metavar="FILE", help="Model registry, instead of config/models.yaml."),
    ] = None,
) -> None:
    """Options of all commands."""
    if version:
        from common import say
        from producers.cli.surroundings import installed_version

        say.out(f"batchmill {installed_version()}")
        raise typer.Exit
    # By environment, so that the processes of an embedded fleet read the same files.
    if config is not None:
        os.environ["BATCHMILL_CONFIG"] = str(config.absolute())
    if models is not None:
        os.environ["BATCHMILL_MODELS"] = str(models.absolute())


@app.command()
def submit(
    file: FileArgument,
    model: ModelOption = None,
    name: Annotated[str | None, typer.Option("--name", help="A name for people.")] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option("--metadata", metavar="K=V", help="Kept with the batch; may be given again."),
    ] = None,
    detach: DetachOption = False,
    output: OutputOption = None,
    max_tokens_default: MaxTokensOption = None,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Bad lines become error results instead of refusing the file.")
    ] = False,
    cache: Annotated[
        str | None,
        typer.Option("--cache", metavar="MODE", help="Result cache: off, read, write or on. (default: the settings')"),
    ] = None,
    timeout: TimeoutOption = None,
    idempotency_key: KeyOption = None,
    priority: PriorityOption = None,
    tenant: TenantOption = None,
    completion_window: WindowOption = None,
    not_before: NotBeforeOption = None,
    run_between: RunBetweenOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check a file of requests, enqueue it, follow it and put its outputs.

    Ctrl-C stops following, not the batch.
    """
    from producers.cli.submit import Wish, submit

    return submit(
        Wish(
            source=file,
            model=model,
            name=name,
            metadata=metadata or [],
            detach=detach,
            output=output,
            max_tokens_default=max_tokens_default,
            skip_invalid=skip_invalid,
            cache=cache,
            timeout_s=timeout,
            idempotency_key=idempotency_key,
            priority=priority,
            tenant=tenant,
            completion_window=completion_window,
            not_before=not_before,
            run_between=run_between,
            as_json=as_json,
        )
    )


@app.command()
def validate(
    file: FileArgument,
    model: ModelOption = None,
    max_tokens_default: MaxTokensOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check a file of requests. Needs no broker and enqueues nothing."""
    from producers.cli.validate import validate

    return validate(file, model=model, max_tokens_default=max_tokens_default, as_json=as_json)


@app.command()
def analyze(
    file: FileArgument,
    model: ModelOption = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option("--kv-tokens", metavar="N", min=1, help="Tokens of the KV cache. (default: by models.yaml)"),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option("--block-tokens", metavar="N", min=1, help="Tokens of a block of it. (default: by models.yaml)"),
    ] = None,
    max_tokens_default: MaxTokensOption = None,
    as_json: JsonOption = False,
) -> int:
    """What a file will cost: tokens, shared prefixes, duplicates, what caches save. Runs nothing, needs no GPU."""
    from producers.cli.analyze import analyze

    return analyze(
        file,
        model=model,
        kv_tokens=kv_tokens,
        block_tokens=block_tokens,
        max_tokens_default=max_tokens_default,
        as_json=as_json,
    )


@app.command()
def status(batch_id: IdArgument, as_json: JsonOption = False) -> int:
    """Where a batch stands."""
    from producers.cli.batches import status

    return status(batch_id, as_json=as_json)


@app.command()
def watch(batch_id: IdArgument, output: OutputOption = None, as_json: JsonOption = False) -> int:
    """Follow a batch until it ends, then put its outputs.

    Ctrl-C stops following, not the batch.
    """
    from producers.cli.watch import watch

    return watch(batch_id, output=output, as_json=as_json)


@app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="How many, newest first.")] = 20,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    as_json: JsonOption = False,
) -> int:
    """The newest batches."""
    from producers.cli.batches import show

    return show(limit=None if everything else limit, as_json=as_json)


@app.command()
def prune(
    older_than: Annotated[str, typer.Option("--older-than", metavar="TIME", help="How long ago they ended: 30d, 12h.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only name them.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Remove batches that ended long ago from the store, with their outputs."""
    from producers.cli.prune import prune

    return prune(older_than=older_than, dry_run=dry_run, as_json=as_json)


@app.command()
def cancel(batch_id: IdArgument, as_json: JsonOption = False) -> int:
    """Cancel a batch: what is answered is kept, the rest becomes error results."""
    from producers.cli.orders import cancel

    return cancel(batch_id, as_json=as_json)


@app.command()
def pause(batch_id: IdArgument, as_json: JsonOption = False) -> int:
    """Send nothing more of a batch for now; what was sent is still answered."""
    from producers.cli.orders import pause

    return pause(batch_id, as_json=as_json)


@app.command("resume-dispatch")
def resume_dispatch(batch_id: IdArgument, as_json: JsonOption = False) -> int:
    """Let a paused batch go on."""
    from producers.cli.orders import resume_dispatch

    return resume_dispatch(batch_id, as_json=as_json)


@app.command()
def reprioritize(
    batch_id: IdArgument,
    priority: Annotated[str, typer.Option("--priority", metavar="WORD", help="low, normal, high or urgent.")],
    as_json: JsonOption = False,
) -> int:
    """Give a batch that runs another priority."""
    from producers.cli.orders import reprioritize

    return reprioritize(batch_id, priority=priority, as_json=as_json)


@app.command()
def retry(
    batch_id: IdArgument,
    detach: DetachOption = False,
    output: OutputOption = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Put the outputs of all, the earlier answers with the new ones.")
    ] = False,
    name: Annotated[str | None, typer.Option("--name", help="A name for people. (default: as it was)")] = None,
    timeout: TimeoutOption = None,
    idempotency_key: KeyOption = None,
    priority: PriorityOption = None,
    tenant: TenantOption = None,
    completion_window: WindowOption = None,
    not_before: NotBeforeOption = None,
    run_between: RunBetweenOption = None,
    as_json: JsonOption = False,
) -> int:
    """Enqueue again what is unanswered of a batch that has ended (failed, expired, cancelled requests), and follow it.

    Doing so twice gives the same new batch. Its deadline and its hours are not taken over.
    """
    from producers.cli.retry import Wish, retry
    from producers.intake import Options

    options = Options(
        name=name,
        timeout_s=timeout,
        idempotency_key=idempotency_key,
        priority=priority,
        tenant=tenant,
        completion_window=completion_window,
        not_before=not_before,
        run_between=run_between,
    )
    return retry(Wish(batch_id, detach, output, merged, options, as_json))


@app.command()
def resume(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="See to a fleet and do not follow.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", parser=_folder, help="Folder of the folders ID. (default: ./batchmill-out)"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """After a crash: say what is unfinished, bring the fleet back where it is the embedded one, and follow.

    May be run at any time, and again.
    """
    from producers.cli.resume import resume

    return resume(detach=detach, output=output, as_json=as_json)


@app.command()
def results(
    batch_id: IdArgument,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Folder; - for all lines on stdout. (default: ./batchmill-out/ID)"
        ),
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="What is answered so far, while it runs.")] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="Of a retry: with the answers of the batch that it retries.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Put the outputs of a batch."""
    from producers.cli.results import results

    return results(batch_id, output=output, partial=partial, merged=merged, as_json=as_json)


@app.command()
def coordinate(
    shard: Annotated[int, typer.Option("--shard", metavar="N", min=0, help="The shard of batches to run.")] = 0,
) -> int:
    """Run a coordinator: dispatches batches, collects and logs results, writes the outputs. SIGTERM ends it cleanly."""
    from producers.cli.coordinate import coordinate

    return coordinate(shard)


@fleet_app.command("up")
def fleet_up(model: ModelOption = None, as_json: JsonOption = False) -> int:
    """Bring it up, to stay until `fleet down`, and wait until the model is ready."""
    from producers.cli.fleet import up

    return up(model=model, as_json=as_json)


@fleet_app.command("down")
def fleet_down(
    now: Annotated[bool, typer.Option("--now", help="Do not let workers finish what they run.")] = False,
    as_json: JsonOption = False,
) -> int:
    """End it. Unfinished batches wait in the store."""
    from producers.cli.fleet import down

    return down(now=now, as_json=as_json)


@fleet_app.command("status")
def fleet_status(as_json: JsonOption = False) -> int:
    """What runs, and where its logs are. Exit code 3 when none runs."""
    from producers.cli.fleet import show

    return show(as_json=as_json)
