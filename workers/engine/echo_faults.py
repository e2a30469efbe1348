"""The echo engine's fault script: what goes wrong with requests that carry a marker. For tests.

`BATCHMILL_ECHO_FAULTS` is a list `MARKER=action` with commas between; a request whose body contains the marker meets
the action. Actions: `die` (the engine is dead from then on), `kill` (SIGKILL of the process), `hang`, `slow:SECONDS`,
`abort` (200 with finish reason abort), `garbage` (200 that is not JSON), `raise`, `memoryerror`, `systemexit`, or an
HTTP status such as `500`. `*N` behind an action limits it to the first N times.
"""

from __future__ import annotations

import threading

from common.errors import UsageError

ACTIONS = frozenset({"die", "kill", "hang", "slow", "abort", "garbage", "raise", "memoryerror", "systemexit"})


class Fault:
    """One entry: `action`, `seconds` (of `slow`), `status` (of an HTTP status)."""

    def __init__(self, marker: bytes, action: str, seconds: float, status: int, times: int | None) -> None:
        self.marker = marker
        self.action = action
        self.seconds = seconds
        self.status = status
        self._left = times
        self._lock = threading.Lock()

    def take(self) -> bool:
        """True while it still happens; counts."""
        with self._lock:
            if self._left is None:
                return True
            self._left -= 1
            return self._left >= 0


class Faults:
    """A parsed script; `UsageError` when it cannot be read."""

    def __init__(self, script: str) -> None:
        self._faults = [_parse(entry.strip()) for entry in script.split(",") if entry.strip()]

    def __bool__(self) -> bool:
        return bool(self._faults)

    def find(self, body: bytes) -> Fault | None:
        """The first fault that this request meets, counted."""
        for fault in self._faults:
            if fault.marker in body and fault.take():
                return fault
        return None


def _parse(entry: str) -> Fault:
    marker, _, rest = entry.partition("=")
    action, _, times = rest.partition("*")
    action, _, seconds = action.partition(":")
    try:
        status = int(action) if action.isdigit() else 0
        if not marker or (not status and action not in ACTIONS):
            raise ValueError
        return Fault(marker.encode(), action, float(seconds or 0), status, int(times) if times else None)
    except ValueError:
        raise UsageError(f"BATCHMILL_ECHO_FAULTS: cannot read '{entry}'; write MARKER=action") from None
