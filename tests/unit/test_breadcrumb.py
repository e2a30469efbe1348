"""The breadcrumb and what a supervisor makes of it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from common.ids import new_batch_id
from tests.support.chunks import chat, make_chunk
from workers import breadcrumb
from workers.breadcrumb import Breadcrumb, Crumb, HeldChunk
from workers.crash_report import reports

BATCH = new_batch_id()


def make(path: Path, slots: int = 4) -> Breadcrumb:
    return Breadcrumb(path, node="n@host", model="m@1", life="7.a", slots=slots)


def test_it_names_what_is_inside_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "run" / "n.crumb"
    crumb = make(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first, second = make_chunk([chat("a")], "m@1"), make_chunk([chat("b")], "m@1", reply_to="results.12")
    one, two = crumb.hold(first), crumb.hold(second)
    slots = [crumb.enter(one, BATCH.encode(), 5), crumb.enter(two, BATCH.encode(), 6), crumb.enter(one, b"b", 1 << 31)]
    crumb.leave(slots[0])
    found = breadcrumb.read(path)
    assert found is not None
    assert (found.node, found.model, found.life) == ("n@host", "m@1", "7.a")
    assert {c.id: (c.reply_to, c.inside) for c in found.chunks} == {
        first.id: ("results.0", {"b": [1 << 31]}),
        second.id: ("results.12", {BATCH: [6]}),
    }
    crumb.release(two)
    found = breadcrumb.read(path)
    assert found is not None
    assert [chunk.id for chunk in found.chunks] == [first.id]
    crumb.remove()
    assert breadcrumb.read(path) is None
    assert list(path.parent.iterdir()) == []


def test_more_than_it_was_made_for_is_left_out(tmp_path: Path) -> None:
    crumb = make(tmp_path / "c", slots=1)
    chunk = crumb.hold(make_chunk([chat("a")], "m@1"))
    assert crumb.enter(chunk, b"b", 1) == 0
    assert crumb.enter(chunk, b"b", 2) == -1
    crumb.leave(-1)
    crumb.leave(0)
    assert crumb.enter(chunk, b"b", 3) == 0
    assert [crumb.hold(make_chunk([chat("a")], "m@1")) >= 0 for _ in range(64)] == [True] * 63 + [False]
    crumb.release(-1)


def test_it_outlives_the_process_that_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "n.crumb"
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.unit.test_breadcrumb import *\n"
        "crumb = make(Path(sys.argv[1]))\nchunk = crumb.hold(make_chunk([chat('secret')], 'm@1'))\n"
        "crumb.enter(chunk, b'batch', 3)\nprint('there', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, cwd=Path.cwd())
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    found = breadcrumb.read(path)
    assert found is not None
    assert [chunk.inside for chunk in found.chunks] == [{"batch": [3]}]
    assert b"secret" not in path.read_bytes()


@pytest.mark.parametrize("content", [b"", b"x" * 5000, b"BMCRUMB1" + b"\xff" * 5000, b"BMCRUMB1"])
def test_a_file_that_is_none_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c").write_bytes(content)
    assert breadcrumb.read(tmp_path / "c") is None
    assert breadcrumb.read(tmp_path / "missing") is None


def test_a_request_costs_microseconds(tmp_path: Path) -> None:
    crumb = make(tmp_path / "c", slots=600)
    chunk = crumb.hold(make_chunk([chat("a")], "m@1"))
    batch = BATCH.encode()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for position in range(2000):
            crumb.leave(crumb.enter(chunk, batch, position))
        best = min(best, (time.perf_counter() - began) / 2000)
    assert best < 100e-6


def test_a_report_names_each_chunk_and_suspects_only_after_a_crash() -> None:
    crumb = Crumb("n", "m@1", "7.a", [HeldChunk("c1", "results.0", {BATCH: [9, 3, 3]}), HeldChunk("c2", "results.4")])
    found = reports(crumb, "signal 9", charge=True)
    assert [(to, r.chunk, r.node, r.done, r.parts) for to, r in found] == [
        ("results.0", "c1", "n", False, []),
        ("results.4", "c2", "n", False, []),
    ]
    crash = found[0][1].crash
    assert crash is not None
    assert (crash.life, crash.reason) == ("7.a", "signal 9")
    assert [(i.batch, np.frombuffer(i.pos, "<u4").tolist()) for i in crash.inside] == [(BATCH, [3, 9])]
    assert all(r.crash is not None and r.crash.inside == [] for _, r in reports(crumb, "exit 1", charge=False))
