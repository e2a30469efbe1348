"""Every command and option is in the docs, and no option is there that a command lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from producers.cli.app import app
from tests.support.processes import ROOT
from workers.cli import app as workers_app

DOCS = ROOT / "docs"
#: Sections of docs/cli.md that stand for several commands.
TOGETHER = {"pause": "pause and resume-dispatch", "resume-dispatch": "pause and resume-dispatch"}
#: Options that a section names of other commands.
OF_OTHERS = {"status": {"--detach", "--partial"}}


def commands(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands below one, with their words."""
    if not isinstance(command, click.Group):
        yield name.strip(), command
        return
    for word, inner in command.commands.items():
        yield from commands(inner, f"{name} {word}")


def options(command: click.Command) -> list[set[str]]:
    """The long names of each option but `--help`."""
    found = [
        {name for name in (*p.opts, *p.secondary_opts) if name.startswith("--")}
        for p in command.params
        if isinstance(p, click.Option)
    ]
    return [names for names in found if names and "--help" not in names]


def named(text: str) -> set[str]:
    """The options that a text names."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_the_page_of_producers_has_every_option_and_no_other() -> None:
    page = (DOCS / "cli.md").read_text("utf-8")
    sections = {s.partition("\n")[0].strip(): s for s in re.split(r"^## ", page, flags=re.MULTILINE)[1:]}
    there: dict[str, set[str]] = {}
    for name, command in commands(app):
        title = TOGETHER.get(name, name.split()[0])
        for names in options(command):
            there.setdefault(title, set()).update(names)
            assert names & named(sections[title]), f"{name}: {names} is not documented"
        there.setdefault(title, set())
    for title, known in there.items():
        assert named(sections[title]) <= known | OF_OTHERS.get(title, set()), title


@pytest.mark.parametrize(("name", "command"), list(commands(workers_app)))
def test_every_option_of_workers_is_documented(name: str, command: click.Command) -> None:
    pages = "\n".join((DOCS / f"{page}.md").read_text("utf-8") for page in ("operations", "models", "cache"))
    assert f"workers {name}" in pages
    for names in options(command):
        assert names & named(pages), f"workers {name}: {names} is not documented"
