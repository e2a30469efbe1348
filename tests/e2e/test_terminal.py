"""What a person sees on a terminal: a bar that moves, and the way back after Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time

from tests.e2e.conftest import Shell, chat, on_one_broker
from tests.support.processes import ROOT

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """A command on a pseudo-terminal of 80 columns."""

    def __init__(self, shell: Shell, *argv: str) -> None:
        base = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
        base |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        # So that nothing of it is left behind by a test that fails.
        base |= shell.processes.marks
        master, slave = pty.openpty()
        self.master = master
        self.shown = ""
        self.process = subprocess.Popen(
            # Its controlling terminal, so that ^C typed there is a SIGINT.
            ["setsid", "--ctty", sys.executable, "-m", "producers", *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=shell.folder,
            env=base | shell.env,
        )
        os.close(slave)

    def wait_for(self, pattern: str, timeout: float = 60) -> re.Match[str]:
        """The first match in what was shown since the last call, without control sequences."""
        deadline = time.monotonic() + timeout
        while True:
            found = re.search(pattern, self.shown)
            if found:
                self.shown = self.shown[found.end() :]
                return found
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            try:
                data = os.read(self.master, 65536) if ready else b""
            except OSError:
                data = b""
            assert data, f"{pattern!r} never came; shown: {self.shown[-2000:]}"
            self.shown += _CONTROL.sub("", data.decode("utf-8", "replace"))

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.master, text.encode())


@on_one_broker
def test_a_bar_while_it_runs_ctrl_c_and_back(fleet: Shell) -> None:
    path = fleet.write("in.jsonl", [*(chat(f"c{i}", "quick") for i in range(20)), chat("last", "HANG")])
    terminal = Terminal(fleet, "submit", str(path))
    batch_id = terminal.wait_for(r"batch_[0-9a-z]{26}")[0]
    terminal.wait_for(r"━ 20/21 +95%")
    terminal.wait_for(r"in progress")
    terminal.type("\x03")
    terminal.wait_for(rf"producers watch {batch_id}")
    assert terminal.process.wait(60) == 130
    again = Terminal(fleet, "watch", batch_id)
    again.wait_for(r"━ 20/21 +95%")
    fleet.run("cancel", batch_id)
    again.wait_for(rf"{batch_id} cancelled: 20 answered, 1 failed")
    assert again.process.wait(60) == 4


@on_one_broker
def test_what_it_waits_for_is_shown(shell: Shell) -> None:
    shell.processes.coordinator(shell.env)
    path = shell.write("in.jsonl", [chat("a", "x")])
    shell.run("submit", str(path), "--detach")
    (seen,) = shell.run("list", "--json").json["data"]
    terminal = Terminal(shell, "watch", seen["id"])
    terminal.wait_for("no worker serves echo-test@1")
    terminal.type("\x03")
    assert terminal.process.wait(60) == 130
