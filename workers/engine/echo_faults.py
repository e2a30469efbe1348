"""The echo engine's fault script: what goes wrong with requests that carry a marker. For tests.

`BATCHMILL_ECHO_FAULTS` is a list `MARKER=action` with commas between; a request whose body contains the marker meets
the action. Actions: `die` (the engine is dead from then on), `kill` (SIGKILL of the process), `hang`, `slow:SECONDS`,
`until:FILE` (answered once there is such a file), `abort` (200 with finish reason abort), `garbage` (200 that is not
JSON), `raise`, `memoryerror`, `systemexit`, or an HTTP status such as `500`. `*N` behind an action limits it
to the first N times: of this process, or of all processes with the same `BATCHMILL_ECHO_FAULTS_DIR`, an existing folder
(so that what ends the process can happen once).
"""

from __future__ import annotations

import os
import threading

from common.errors import UsageError

ACTIONS = frozenset({"die", "kill", "hang", "slow", "until", "abort", "garbage", "raise", "memoryerror", "systemexit"})


class Fault:
    """One entry: `action`, `seconds` (of `slow`), `file` (of `until`), `status` (of an HTTP status)."""

    def __init__(
        self,
        marker: bytes,
        action: str,
        seconds: float,
        status: int,
        times: int | None,
        folder: str | None = None,
        file: str = "",
    ) -> None:
        self.marker = marker
        self.action = action
        self.seconds = seconds
        self.file = file
        self.status = status
        self._left = times
        self._times = times or 0
        self._folder = folder
        self._lock = threading.Lock()

    def take(self) -> bool:
        """True while it still happens; counts."""
        with self._lock:
            if self._left is None:
                return True
            if self._folder is not None:
                return self._take_a_turn(self._folder)
            self._left -= 1
            return self._left >= 0

    def _take_a_turn(self, folder: str) -> bool:
        for turn in range(self._times):
            try:
                os.close(os.open(f"{folder}/{self.marker.hex()}.{turn}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return True
        return False


class Faults:
    """A parsed script; `UsageError` when it cannot be read."""

    def __init__(self, script: str, folder: str | None = None) -> None:
        self._faults = [_parse(entry.strip(), folder) for entry in script.split(",") if entry.strip()]

    def __bool__(self) -> bool:
        return bool(self._faults)

    def find(self, body: bytes) -> Fault | None:
        """The first fault that this request meets, counted."""
        for fault in self._faults:
            if fault.marker in body and fault.take():
                return fault
        return None


def _parse(entry: str, folder: str | None) -> Fault:
    marker, _, rest = entry.partition("=")
    action, _, times = rest.partition("*")
    action, _, detail = action.partition(":")
    try:
        status = int(action) if action.isdigit() else 0
        file = detail if action == "until" else ""
        if not marker or (not status and action not in ACTIONS) or (action == "until" and not file):
            raise ValueError
        seconds = 0.0 if file else float(detail or 0)
        return Fault(marker.encode(), action, seconds, status, int(times) if times else None, folder, file)
    except ValueError:
        raise UsageError(f"BATCHMILL_ECHO_FAULTS: cannot read '{entry}'; write MARKER=action") from None
