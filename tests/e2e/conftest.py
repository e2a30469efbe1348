"""A fleet to type commands at: a coordinator and a worker with the echo engine, on either broker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ECHO_MODEL
from tests.support.processes import ROOT, Process, Processes

#: For what has nothing to do with the broker: the test runs on one of them.
on_one_broker = pytest.mark.parametrize("broker", ["redis"], indirect=True)


@dataclass
class Shell:
    """Runs `producers …` as a user does, in a folder of its own."""

    env: dict[str, str]
    folder: Path
    processes: Processes
    #: Added to the environment of every command.
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def let_go_file(self) -> Path:
        """Once it is there, the engine answers requests that say HELD."""
        return self.processes.folder / "let-go"

    def let_go(self) -> None:
        """Let requests be answered that say HELD. Until then their batch runs, however fast or slow the machine is."""
        self.let_go_file.touch()

    def run(self, *argv: str, stdin: bytes | None = None, code: int | None = 0, timeout: float = 120) -> Done:
        """A command to its end; `AssertionError` unless it exits with `code` (None: any)."""
        base = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")} | {"PYTHONPATH": str(ROOT)}
        finished = subprocess.run(
            [sys.executable, "-m", "producers", *argv],
            input=stdin if stdin is not None else b"",
            capture_output=True,
            timeout=timeout,
            cwd=self.folder,
            env=base | self.env | self.extra,
            check=False,
        )
        done = Done(finished.returncode, finished.stdout.decode(), finished.stderr.decode())
        assert code is None or done.code == code, f"{argv} exited with {done.code}, not {code}:\n{done.out}\n{done.err}"
        assert "Traceback" not in done.err, done.err
        return done

    def start(self, *argv: str) -> Process:
        """A command that is left running."""
        return self.processes.python("producers", "-m", "producers", *argv, env=self.env | self.extra, cwd=self.folder)

    def write(self, name: str, requests: Sequence[Mapping[str, Any]]) -> Path:
        """A batch file."""
        path = self.folder / name
        path.write_text("".join(json.dumps(r) + "\n" for r in requests))
        return path


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        found: dict[str, Any] = json.loads(self.out)
        return found


def chat(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    """A chat request in the short form."""
    return {"custom_id": custom_id, "body": {"messages": [{"role": "user", "content": text}], **body}}


@pytest.fixture
def shell(tmp_path: Path, fleet_env: dict[str, str], processes: Processes) -> Shell:
    """Commands of a fleet of which nothing runs yet, on either broker."""
    folder = tmp_path / "here"
    folder.mkdir()
    return Shell(fleet_env, folder, processes)


@pytest.fixture
def fleet(shell: Shell) -> Shell:
    """The same, with a coordinator and a worker. Requests that say HANG never end, those that say HELD at `let_go`."""
    env = shell.env | {"BATCHMILL_ECHO_FAULTS": f"HANG=hang,HELD=until:{shell.let_go_file}"}
    shell.processes.coordinator(env)
    shell.processes.worker(env, ECHO_MODEL)
    return shell
