"""`workers models pull|verify|list`: the model files of this machine."""

from __future__ import annotations

from typing import Any

import click

from common import addresses, say
from common import registry as registries
from common import settings as setting_files
from common.errors import BatchmillError, UsageError
from common.grammar import Group
from common.registry import Registry
from common.settings import Settings
from workers.models import digest as digests
from workers.models.pull import pull as pull_model
from workers.models.source import model_folder, record_file
from workers.models.verify import present, verify

model_argument = click.argument("model", metavar="[MODEL]", required=False, help="name or name@version")
json_option = click.option("--json", is_flag=True, help="print JSON on stdout")


@click.group(name="models", cls=Group)
def app() -> None:
    """Model files: pull, verify, list."""


@app.command()
@model_argument
@json_option
def pull(model: str | None, json: bool) -> None:
    """Bring a model to this machine (default: the default model). A second run downloads nothing."""
    settings, registry = setting_files.load(), registries.load()
    name = registry.resolve(model or settings.inference.default_model)
    done = pull_model(name, registry.get(name), settings, _say)
    if json:
        _print_json({"model": name, "folder": str(done.folder), "digest": done.digest, "new": done.new})
    elif not done.new:
        say.out(f"{name}: already here, {done.folder}")


@app.command("verify")
@model_argument
@json_option
def verify_models(model: str | None, json: bool) -> None:
    """Read every file and compare with the digest (default: all models that are on this machine)."""
    settings, registry = setting_files.load(), registries.load()
    names = [registry.resolve(model)] if model else [n for n in registry.versions if _is_here(registry, n, settings)]
    results: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in names:
        try:
            found = verify(name, registry.get(name), settings)
        except BatchmillError as exc:
            failed.append(str(exc))
            results.append({"model": name, "ok": False, "problem": str(exc)})
        else:
            results.append({"model": name, "ok": True, "folder": str(found.folder), "digest": found.digest})
            if not json:
                say.out(f"{name}: {found.digest}, {found.folder}")
    if json:
        _print_json(results)
        if failed:
            raise click.exceptions.Exit(UsageError.exit_code)
    elif failed:
        raise UsageError("\n".join(failed))
    elif not names:
        say.out("no model is on this machine; `workers models pull` brings the default one")


@app.command("list")
@json_option
def list_models(json: bool) -> None:
    """Show the models of models.yaml and which of them are on this machine."""
    settings, registry = setting_files.load(), registries.load()
    rows: list[dict[str, Any]] = []
    for name, entry in sorted(registry.versions.items()):
        here = _is_here(registry, name, settings)
        record = digests.read_record(record_file(name, settings)) if here else None
        rows.append(
            {
                "model": name,
                "source": addresses.shown(entry.source),
                "here": here,
                "folder": str(model_folder(name, entry, settings)),
                "digest": entry.digest or (record.digest if record else None),
            }
        )
    if json:
        _print_json(rows)
        return
    width = max((len(row["model"]) for row in rows), default=0)
    for row in rows:
        say.out(f"{row['model']:<{width}}  {'here' if row['here'] else '-':<4}  {row['source']}")


def _is_here(registry: Registry, name: str, settings: Settings) -> bool:
    try:
        present(name, registry.get(name), settings)
    except UsageError:
        return False
    return True


def _say(line: str) -> None:
    say.err(line)


def _print_json(value: Any) -> None:
    say.json(value)
