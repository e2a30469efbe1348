"""What the echo engine's journal and its fault script know over several processes' lives."""

from __future__ import annotations

import asyncio
from pathlib import Path

from common.registry import ModelVersion
from common.settings import Settings
from workers.engine import echo, echo_journal
from workers.engine.echo_faults import Faults

URL = "/v1/chat/completions"


def body(text: str) -> bytes:
    return b'{"messages":[{"role":"user","content":"%b"}]}' % text.encode()


def test_the_journal_tells_what_was_taken_up_and_what_answered(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    assert echo_journal.read(path) == []
    env = {"BATCHMILL_ECHO_JOURNAL": path, "BATCHMILL_ECHO_FAULTS": "BAD=raise"}
    for _ in range(2):
        engine = echo.make("m@1", ModelVersion(source="none"), Settings(), env)
        assert not hasattr(engine, "infer_bulk")
        asyncio.run(engine.infer(URL, body("fine")))

    async def fail() -> None:
        try:
            await engine.infer(URL, body("BAD"))
        except RuntimeError:
            return
        raise AssertionError("the fault did not happen")

    asyncio.run(fail())
    events = echo_journal.read(path)
    assert [event.kind for event in events] == ["+", "=", "+", "=", "+"]
    assert len({event.request for event in events}) == 2
    assert [event.at for event in events] == sorted(event.at for event in events)


def test_a_counted_fault_is_counted_over_all_processes_of_a_folder(tmp_path: Path) -> None:
    lives = [Faults("A=die*2,B=hang", str(tmp_path)) for _ in range(3)]
    found = [life.find(b"A") for life in lives]
    assert [fault is not None for fault in found] == [True, True, False]
    assert all(life.find(b"B") is not None for life in lives)
