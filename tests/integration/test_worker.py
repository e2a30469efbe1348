"""A real worker process on real brokers: chunks in, results out."""

from __future__ import annotations

from pathlib import Path

from common.live import LiveState
from common.messages import Kind, infer_queue
from common.settings import Settings
from tests.conftest import ECHO_MODEL
from tests.support.brokers import Broker
from tests.support.chunks import Dispatch, StartWorker, chat, make_chunk
from tests.support.processes import Processes

QUEUE = infer_queue(ECHO_MODEL)


def test_every_request_is_answered_once_and_acked(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, processes: Processes
) -> None:
    worker = start_worker()
    chunks = [dispatch.send(make_chunk([chat(f"{c}-{i}") for i in range(300)], ECHO_MODEL)) for c in range(5)]
    for chunk in chunks:
        answers = dispatch.wait(chunk)
        assert answers.kinds() == dict.fromkeys(range(300), Kind.OUTPUT)
        assert answers.last.node.startswith("echo-test.1.cpu0@")
        assert sum(part.usage.completion_tokens for m in answers.messages for part in m.parts) > 300
    line = dispatch.of(chunks[3]).lines()[7]
    assert line["custom_id"] == "r7"
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "echo: 3-7"
    broker.wait_depth(QUEUE, ready=0, unacked=0)
    assert worker.stop() == 0
    processes.wait_gone()


def test_requests_singly_with_waits_and_each_kind_of_trouble(
    broker: Broker, dispatch: Dispatch, start_worker: StartWorker, processes: Processes
) -> None:
    faults = "E500=500,ONCE=503*1,R429=429,ABRT=abort,GARB=garbage,HANG=hang,"
    faults += "RAIS=raise,MEMO=memoryerror,SYSE=systemexit"
    worker = start_worker(BATCHMILL_ECHO_FAULTS=faults, BATCHMILL_ECHO_LATENCY_MS=5)
    names = ["fine", "E500", "ONCE", "ABRT", "GARB", "RAIS", "MEMO", "SYSE", "HANG", "R429", "also fine"]
    bodies = [chat(name) for name in names] + [b"{}"]
    chunk = dispatch.send(make_chunk(bodies, ECHO_MODEL, timeout_s=5))
    answers = dispatch.wait(chunk)
    found = {([*names, "refused"])[pos]: kind for pos, kind in answers.kinds().items()}
    retried = dict.fromkeys(["E500", "ABRT", "GARB", "RAIS", "MEMO", "SYSE", "HANG", "R429"], Kind.RETRY)
    assert found == retried | dict.fromkeys(["fine", "ONCE", "also fine"], Kind.OUTPUT) | {"refused": Kind.ERROR}
    lines = answers.lines()
    assert lines[1]["response"]["status_code"] == 500
    assert lines[3]["error"]["code"] == "abort"
    assert lines[8]["error"]["code"] == "timeout"
    assert lines[11]["response"]["status_code"] == 400
    # The slots are all there: as many chunks again as there are threads.
    more = [dispatch.send(make_chunk([chat(f"SYSE {i}"), chat("x")], ECHO_MODEL)) for i in range(4)]
    for one in more:
        assert dispatch.wait(one).kinds() == {0: Kind.RETRY, 1: Kind.OUTPUT}
    broker.wait_depth(QUEUE, ready=0, unacked=0)
    assert worker.stop() == 0
    processes.wait_gone()


def test_leases_and_announcement(
    dispatch: Dispatch, start_worker: StartWorker, fleet_settings: Settings, tmp_path: Path
) -> None:
    worker = start_worker(BATCHMILL_ECHO_FAULTS=f"HELD=until:{tmp_path}/let-go")
    live = LiveState(fleet_settings)
    chunk = dispatch.send(make_chunk([chat("HELD")], ECHO_MODEL))
    dispatch.collect(lambda: live.leases([chunk.id])[0] is not None, 10, "lease")
    # Announced before it takes anything.
    [facts] = live.workers()
    assert live.leases([chunk.id]) == [facts.node]
    assert (facts.model, facts.state, facts.engine, facts.max_num_seqs) == (ECHO_MODEL, "ready", "echo", 64)
    (tmp_path / "let-go").touch()
    dispatch.wait(chunk)
    dispatch.collect(lambda: live.leases([chunk.id])[0] is None, 10, "lease given back")
    assert worker.stop() == 0
    assert live.workers() == []
    live.close()
