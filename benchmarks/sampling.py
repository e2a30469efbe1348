"""What the processes of a run do, as py-spy (`pip install py-spy`) and the kernel see it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from pathlib import Path

_THREAD = re.compile(r"^Thread (\d+) \([^)]*\): \"([^\"]+)\"", re.MULTILINE)


class Flames:
    """py-spy on each process of a run: one flame graph a role, of all threads, of the moments with the GIL."""

    def __init__(self, folder: Path | None, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        self._running: list[tuple[Path, subprocess.Popen[bytes]]] = []

    def watch(self, role: str, pid: int) -> None:
        """Sample a process from now on, until `close` or its end."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        argv = ["py-spy", "record", "--pid", str(pid), "--rate", "500", "--gil", "--function", "--threads"]
        path = self._folder / f"{self._kind}-{role}.svg"
        # A process that is stopped for every sample is woken from its waits by it, and the event loop runs for nothing.
        argv += ["--nonblocking", "--format", "flamegraph", "--output", str(path)]
        self._running.append((path, subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)))

    def close(self) -> None:
        """Let every py-spy write what it saw."""
        for _, process in self._running:
            process.send_signal(signal.SIGINT)
        for path, process in self._running:
            process.wait(60)
            # Its title is the command line, with the paths of this machine in it.
            text = path.read_text("utf-8")
            path.write_text(re.sub(r'(id="title"[^>]*>)[^<]*', rf"\g<1>{path.stem}", text), "utf-8")
        self._running.clear()


class Threads:
    """CPU seconds of the threads of one process since this was made, by the names that Python knows them by."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._read()

    def used(self) -> dict[str, float]:
        """CPU seconds by name; numbers at a name's end are left out, so that the threads of a pool are one."""
        dump = subprocess.run(["py-spy", "dump", "--pid", str(self._pid)], capture_output=True, text=True, check=True)
        names = dict(_THREAD.findall(dump.stdout))
        found: dict[str, float] = {}
        for thread, seconds in self._read().items():
            name = re.sub(r"-\d+$", "", names.get(thread, "not Python's"))
            found[name] = found.get(name, 0.0) + seconds - self._before.get(thread, 0.0)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _read(self) -> dict[str, float]:
        found = {}
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
        return found
