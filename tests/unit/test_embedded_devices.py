"""Which models' workers run at a time: GPUs are had by one model, given up when it is idle; a CPU is shared."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from common.live import WorkerFacts
from common.registry import Hardware, ModelVersion, Registry
from common.settings import Settings
from producers.embedded import daemon as daemon_module
from producers.embedded.daemon import Daemon
from producers.embedded.layout import Layout

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon that is ticked by hand; its workers sleep, and what is active is said by `active`."""
    models = {name: ModelVersion(source="/x") for name in ("a@1", "b@1")}
    models["cpu@1"] = ModelVersion(source="/x", hardware=Hardware(gpus=0))
    layout = Layout(tmp_path / "fleet")
    layout.create()
    settings = msgspec.convert({"broker": {"url": "redis+socket:///nowhere"}}, Settings)
    monkeypatch.setattr(daemon_module, "_python", lambda *_argv: list(SLEEP))
    monkeypatch.setattr(daemon_module, "has_gpu", lambda: True)
    monkeypatch.setattr("producers.embedded.redis_server.find_binary", lambda: "redis-server")
    made = Daemon(layout, settings, Registry(models, {}, None), {**os.environ, "BATCHMILL_HOME": str(tmp_path)})
    yield made
    for child in made.workers.values():
        child.kill()
        while child.alive:
            child.tend(0.0, start=False)


def activate(daemon: Daemon, *models: str) -> None:
    """These models have an unfinished batch that may run, and no other."""
    daemon.active.due = counts = Counter(models)
    daemon.active.models = lambda now=None: counts  # type: ignore[method-assign]


def states(daemon: Daemon) -> dict[str, str]:
    return {m: daemon._worker_state(m, c).state for m, c in daemon.workers.items()}


def tick_until(daemon: Daemon, wanted: dict[str, str]) -> None:
    for now in range(10_000):
        daemon._tend_workers(float(now))
        if states(daemon) == wanted:
            return
    raise AssertionError(f"{states(daemon)}, not {wanted}")


def test_one_model_at_a_time_has_the_gpus_and_gives_them_up_when_idle(daemon: Daemon) -> None:
    activate(daemon, "a@1", "b@1")
    tick_until(daemon, {"a@1": "starting", "b@1": "waiting"})
    assert "another model has the GPUs" in (daemon._worker_state("b@1", daemon.workers["b@1"]).detail or "")
    activate(daemon, "b@1")
    tick_until(daemon, {"a@1": "waiting", "b@1": "starting"})
    activate(daemon, "a@1", "b@1")
    for now in range(20_000, 20_010):
        daemon._tend_workers(float(now))
    assert states(daemon) == {"a@1": "waiting", "b@1": "starting"}


def test_a_batch_whose_hours_have_not_come_holds_no_gpus(daemon: Daemon) -> None:
    activate(daemon, "a@1")
    tick_until(daemon, {"a@1": "starting"})
    # Now a@1 has a batch that waits for the night, and b@1 one that does not.
    activate(daemon, "a@1", "b@1")
    daemon.active.due = Counter(["b@1"])
    tick_until(daemon, {"a@1": "waiting", "b@1": "starting"})


def test_models_without_gpus_run_beside(daemon: Daemon) -> None:
    activate(daemon, "a@1", "cpu@1")
    tick_until(daemon, {"a@1": "starting", "cpu@1": "starting"})


def test_a_worker_that_made_way_has_not_failed(daemon: Daemon) -> None:
    activate(daemon, "a@1")
    tick_until(daemon, {"a@1": "starting"})
    activate(daemon, "b@1")
    tick_until(daemon, {"a@1": "waiting", "b@1": "starting"})
    assert daemon.failed == set()
    activate(daemon, "a@1")
    tick_until(daemon, {"a@1": "starting", "b@1": "waiting"})


@pytest.mark.parametrize(("model", "all_gpus"), [("a@1", True), ("cpu@1", False)])
def test_only_a_model_that_needs_gpus_gets_all_of_them(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, model: str, all_gpus: bool
) -> None:
    monkeypatch.setattr(daemon_module, "_python", lambda *argv: list(argv))
    assert ("--all-gpus" in daemon._worker_argv(model)) == all_gpus
    monkeypatch.setattr(daemon_module, "has_gpu", lambda: False)
    assert "--all-gpus" not in daemon._worker_argv(model)


def test_while_the_fleet_ends_no_worker_is_said_to_come_back(daemon: Daemon) -> None:
    activate(daemon, "a@1", "cpu@1")
    tick_until(daemon, {"a@1": "starting", "cpu@1": "starting"})
    daemon.stopping = True
    daemon._end_children(list(daemon.workers.values()), 10)
    for model, child in daemon.workers.items():
        state = daemon._worker_state(model, child)
        assert (state.state, state.detail) == ("draining", "the fleet is ending")


def test_a_model_is_unloaded_when_its_batches_may_not_run_for_a_while(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("producers.embedded.demand.now_s", lambda: clock[0])
    daemon.linger_s = 300.0
    activate(daemon, "cpu@1")
    tick_until(daemon, {"cpu@1": "starting"})
    # Its hours have ended.
    daemon.active.due, daemon.active.waiting = Counter(), Counter(["cpu@1"])
    clock[0] += 299
    daemon._tend_workers(20_000.0)
    assert daemon.making_way == set()
    supervisor = daemon.workers["cpu@1"].pid
    assert supervisor is not None
    busy = WorkerFacts(
        node="n", model="cpu@1", host="h", pid=os.getpid(), device="", engine="", state="ready", max_num_seqs=1,
        chunks_in_flight=1, running=1, supervisor=supervisor,
    )  # fmt: skip
    daemon.facts = [busy]
    clock[0] += 2
    daemon._tend_workers(20_001.0)
    assert daemon.making_way == set(), "what it has is answered first"
    daemon.facts = []
    tick_until(daemon, {"cpu@1": "waiting"})
    assert "cpu@1 is not loaded" in (daemon._worker_state("cpu@1", daemon.workers["cpu@1"]).detail or "")
    assert daemon.failed == set()
    clock[0] += 9 * 3600
    activate(daemon, "cpu@1")
    tick_until(daemon, {"cpu@1": "starting"})
    # A fleet that was brought up to stay keeps what it loaded.
    daemon.linger_s = -1.0
    daemon.active.due, daemon.active.waiting = Counter(), Counter(["cpu@1"])
    clock[0] += 9 * 3600
    daemon._tend_workers(40_000.0)
    assert daemon.making_way == set()
