"""The points of a sweep, each run by a child process, and which of them is best."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from common.engine_arguments import argument, size
from common.registry import ModelVersion
from workers import parent
from workers.tune.point import NAMES, RESULT, Measured, Numbers, Wanted

#: vLLM's own defaults for offline use, where the entry says nothing.
DEFAULT_SEQS = 256
DEFAULT_TOKENS = 8192
#: Rates that differ by less are the same: then what is there stays, or the smaller engine wins.
NOISE = 0.02
#: Seconds a child gets to end its engine.
END_S = 30.0


def present(entry: ModelVersion) -> Numbers:
    """The numbers that an entry has now."""
    return Numbers(
        max_num_seqs=size(argument(entry.engine, "max_num_seqs")) or DEFAULT_SEQS,
        max_num_batched_tokens=size(argument(entry.engine, "max_num_batched_tokens")) or DEFAULT_TOKENS,
    )


def grid(now: Numbers, seqs: Sequence[int], tokens: Sequence[int], chunks: Sequence[int]) -> list[Numbers]:
    """All combinations; without a list: half, the same and twice the requests, the same and twice the tokens."""
    seqs = seqs or (max(1, now.max_num_seqs // 2), now.max_num_seqs, now.max_num_seqs * 2)
    tokens = tokens or (now.max_num_batched_tokens, now.max_num_batched_tokens * 2)
    return [
        Numbers(max_num_seqs=s, max_num_batched_tokens=t, chunk=c)
        for s, t, c in dict.fromkeys(itertools.product(seqs, tokens, chunks or (0,)))
    ]


def best(points: Sequence[Measured], now: Numbers) -> Measured | None:
    """The fastest point that ran; of those as fast, the one that is there already, else the smallest."""
    ran = [p for p in points if p.problem is None]
    if not ran:
        return None
    top = max(p.requests_per_s for p in ran)
    good = [p for p in ran if p.requests_per_s >= top * (1 - NOISE)]

    def order(point: Measured) -> tuple[bool, int, int, float]:
        numbers = point.numbers
        same = all(getattr(numbers, name) == getattr(now, name) for name in NAMES)
        return not same, numbers.max_num_seqs, numbers.max_num_batched_tokens, -point.requests_per_s

    return min(good, key=order)


def run(
    model: str,
    points: Sequence[Numbers],
    sample: str,
    requests: int,
    timeout_s: float,
    tell: Callable[[Measured], None],
) -> list[Measured]:
    """Measure every point, one after the other; one that fails is a row that says why."""
    found = []
    for numbers in points:
        wanted = Wanted(model=model, numbers=numbers, sample=sample, requests=requests)
        found.append(_child(wanted, timeout_s))
        tell(found[-1])
    return found


def _child(wanted: Wanted, timeout_s: float) -> Measured:
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "workers.tune.point"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            # It dies with us, and its engine with it, however we end.
            env=os.environ | {parent.SUPERVISOR_PID: str(os.getpid())},
        )
        try:
            out, _ = child.communicate(msgspec.json.encode(wanted), timeout_s)
        except subprocess.TimeoutExpired:
            return Measured(numbers=wanted.numbers, problem=f"took longer than {timeout_s:g} s")
        finally:
            _end(child)
        line = next((x for x in reversed(out.decode("utf-8", "replace").splitlines()) if x.startswith(RESULT)), None)
        if line is not None:
            return msgspec.json.decode(line.removeprefix(RESULT), type=Measured)
        return Measured(numbers=wanted.numbers, problem=_why(child.returncode, log))


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _why(status: int, log: IO[bytes]) -> str:
    if status == -signal.SIGKILL:
        return "its process was killed, as the kernel does when memory runs out"
    if status < 0:
        return f"its process ended by signal {-status}"
    log.seek(0)
    lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return f"its process ended with status {status}: {lines[-1].strip()[:300] if lines else 'it said nothing'}"
