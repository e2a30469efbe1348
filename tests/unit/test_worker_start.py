"""`workers start`: groups of GPUs, names, what is wrong in one line, and when a supervisor starts what again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import settings as settings_module
from common.errors import Unreachable, UsageError
from common.registry import Hardware, ModelVersion, Registry
from tests.conftest import ECHO_MODEL, make_fleet_env
from tests.support.ports import free_port
from tests.support.processes import ROOT, Processes
from workers import devices, parent
from workers import start as start_module
from workers import supervisor as supervisor_module
from workers.crash_report import Reporter
from workers.start import Options, device_groups, start, wait_for_broker
from workers.supervisor import Child, Supervisor, backoff

PYTHON = [sys.executable, "-c"]


class TestDevices:
    """Which GPUs go together, and what they give a name."""

    def test_groups(self) -> None:
        assert devices.group([], 0) == [devices.Group((), "cpu0")]
        assert [g.label for g in devices.group(["0", "1"], 0)] == ["gpu0", "gpu1"]
        assert [g.label for g in devices.group(["0", "1", "2", "3"], 2)] == ["gpu0-1", "gpu2-3"]
        assert devices.group(["2", "3"], 2)[0].devices == ("2", "3")
        assert devices.group(["GPU-1a2b3c4d-5e6f"], 1)[0].label == "gpu1a2b3c4d"

    @pytest.mark.parametrize(("given", "size"), [([], 1), (["0"], 2), (["0", "1", "2"], 2), (["0", "0"], 1)])
    def test_uneven_groups_are_refused(self, given: list[str], size: int) -> None:
        with pytest.raises(UsageError):
            devices.group(given, size)

    @pytest.mark.parametrize("text", ["", "a", "0,x", "-1", "0 1"])
    def test_ids_are_numbers(self, text: str) -> None:
        with pytest.raises(UsageError, match="--device-ids"):
            devices.parse_ids(text)

    def test_visible(self, tmp_path: Path) -> None:
        assert devices.visible_gpus({"CUDA_VISIBLE_DEVICES": "1, 3,-1"}) == ["1", "3"]
        assert devices.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
        assert devices.visible_gpus({"PATH": str(tmp_path)}) == []
        fake = tmp_path / "nvidia-smi"
        fake.write_text("#!/bin/sh\necho 'GPU 0: X (UUID: a)'\necho 'GPU 1: X (UUID: b)'\n")
        fake.chmod(0o755)
        assert devices.visible_gpus({"PATH": str(tmp_path)}) == ["0", "1"]
        fake.write_text("#!/bin/sh\nexit 9\n")
        assert devices.visible_gpus({"PATH": str(tmp_path)}) == []

    def test_names(self) -> None:
        assert devices.node_name("smollm2-135m@1", "gpu0", "host") == "smollm2-135m.1.gpu0@host"
        assert devices.check_name("left_1") == "left_1"
        for bad in ("", "a b", "a@b", "../x", "x" * 65):
            with pytest.raises(UsageError, match="--name"):
                devices.check_name(bad)


def registry(gpus: int) -> Registry:
    return Registry({"m@1": ModelVersion(source="none", hardware=Hardware(gpus=gpus))}, {}, "m@1")


def labels(options: Options, gpus: int, engine: str = "vllm", ids: str = "", visible: str = "0,1,2,3,4") -> list[str]:
    env = {"BATCHMILL_INFERENCE_ENGINE": engine, "BATCHMILL_INFERENCE_DEVICE_IDS": ids}
    settings = settings_module.load(Path(os.devnull), env)
    given = {"CUDA_VISIBLE_DEVICES": visible}
    return [g.label for g in device_groups(options, settings, registry(gpus), "m@1", given)]


def test_which_devices_are_taken() -> None:
    assert labels(Options(device_ids="0,1,2,3"), 2) == ["gpu0-1", "gpu2-3"]
    assert labels(Options(all_gpus=True), 2) == ["gpu0-1", "gpu2-3"]  # the fifth stays free
    assert labels(Options(all_gpus=True), 1) == ["gpu0", "gpu1", "gpu2", "gpu3", "gpu4"]
    assert labels(Options(), 2) == ["gpu0-1"]
    assert labels(Options(), 1, ids="3,4") == ["gpu3", "gpu4"]
    assert labels(Options(), 0) == ["cpu0"]
    assert labels(Options(), 2, engine="echo") == ["cpu0"]
    for options, gpus in ((Options(), 1), (Options(all_gpus=True), 1), (Options(all_gpus=True), 0)):
        with pytest.raises(UsageError):
            labels(options, gpus, visible="")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A fleet whose broker does not answer."""
    url = f"redis://127.0.0.1:{free_port()}/0"
    return make_fleet_env(tmp_path, url, url)


def command(env: dict[str, str], *argv: str) -> tuple[int, str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
    done = subprocess.run(
        [sys.executable, "-m", "workers", "start", *argv],
        env={**base, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("argv", "change", "says"),
    [
        (["--model", "nope"], {}, "unknown model 'nope'"),
        (["--engine", "magic"], {}, "BATCHMILL_INFERENCE_ENGINE: 'magic' is not one of vllm, echo"),
        (["--device-ids", "x"], {}, "--device-ids: 'x' is not a list of GPU numbers"),
        (["--all-gpus"], {"CUDA_VISIBLE_DEVICES": ""}, "no GPU found"),
        (["--name", "a b"], {}, "--name: 'a b' may hold letters"),
        (["--no-supervisor", "--device-ids", "0,1"], {}, "name the GPUs of one group"),
        ([], {"BATCHMILL_BROKER_URL": ""}, "no broker is configured"),
        ([], {"BATCHMILL_SECURITY_RESULTS_KEY_FILE": ""}, "security.results_key is not set"),
        ([], {"BATCHMILL_BROKER_URL": "amqp://localhost//", "BATCHMILL_STATE_URL": ""}, "state.url is not set"),
        (["--no-supervisor"], {"BATCHMILL_ECHO_LATENCY_MS": "x"}, "BATCHMILL_ECHO_LATENCY_MS: 'x' is not a number"),
    ],
)
def test_mistakes_are_one_line(env: dict[str, str], argv: list[str], change: dict[str, str], says: str) -> None:
    status, stderr = command(env | change, *argv)
    assert status == 2
    assert says in stderr
    assert "Traceback" not in stderr
    assert len([line for line in stderr.splitlines() if line.startswith("workers:")]) == 1


def test_a_broker_that_does_not_answer(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start_module, "BROKER_WAIT_S", 0.5)
    with pytest.raises(Unreachable, match="does not answer"):
        wait_for_broker(settings_module.load(env=env))
    assert capsys.readouterr().err.count("\n") == 1


def test_pinning() -> None:
    pinned = start_module._pinned(devices.Group(("2", "3"), "gpu2-3"))
    assert pinned["CUDA_VISIBLE_DEVICES"] == "2,3"
    # A child that sees its own GPUs takes all it sees.
    settings = settings_module.load(Path(os.devnull), {**pinned})
    assert device_groups(Options(), settings, registry(2), "m@1", pinned) == [devices.Group(("2", "3"), "gpu2-3")]
    assert "CUDA_VISIBLE_DEVICES" not in start_module._pinned(devices.Group((), "cpu0"))


def test_one_worker_a_group(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Child] = []

    class Noted(Supervisor):
        def run(self) -> int:
            children.extend(self._children)
            return 0

    monkeypatch.setattr(start_module, "wait_for_broker", lambda _settings: None)
    monkeypatch.setattr(supervisor_module, "Supervisor", Noted)
    assert start(Options(device_ids="4,7", name="left"), env) == 0
    assert [c.name.split("@")[0] for c in children] == ["echo-test.1.left-gpu4", "echo-test.1.left-gpu7"]
    assert [c.env["CUDA_VISIBLE_DEVICES"] for c in children] == ["4", "7"]
    argv = list(children[0].argv)
    assert argv[2:] == ["workers", "start", "--no-supervisor", "--model", ECHO_MODEL, "--name", "left-gpu4"]


class TestSupervisor:
    """With small children of its own."""

    def test_backoff_doubles_up_to_a_bound(self) -> None:
        assert [backoff(n) for n in (1, 2, 3, 4, 5, 6, 50)] == [1, 2, 4, 8, 16, 30, 30]

    def supervise(self, processes: Processes, *scripts: str, drain_s: float = 5) -> str:
        children = ", ".join(f"Child('c{i}', [sys.executable, '-c', {s!r}])" for i, s in enumerate(scripts))
        return (
            "import sys\nfrom workers import supervisor\nfrom workers.supervisor import Child, Supervisor\n"
            f"supervisor.BACKOFF_S = 0.05\nsupervisor.GRACE_S = 1\n"
            f"sys.exit(Supervisor([{children}], {drain_s}).run())"
        )

    def test_failures_are_started_again_and_ends_are_not(self, processes: Processes, tmp_path: Path) -> None:
        counted = (
            f"import os; p = {str(tmp_path / 'n')!r}; n = len(open(p).read()) if os.path.exists(p) else 0; "
            "open(p, 'a').write('x'); raise SystemExit(0 if n == 2 else 70)"
        )
        process = processes.python("supervisor", "-c", self.supervise(processes, counted, "pass"))
        assert process.wait(60) == 0
        assert (tmp_path / "n").read_text() == "xxx"
        assert process.text.count("worker failed; starting it again") == 2
        processes.wait_gone()

    def test_a_long_start_that_fails_is_a_failed_start(self, tmp_path: Path) -> None:
        """A defect has the status of a dead engine; that the worker never was ready tells them apart."""
        env = make_fleet_env(tmp_path, "redis://127.0.0.1:1/0", "redis://127.0.0.1:1/1")
        reporter = Reporter(settings_module.load(env=env))
        child = Child("c", [], crumb=tmp_path / "none")
        watch = Supervisor([child], 1.0, give_up_after=2, reporter=reporter)
        for failures in (1, 2):
            child.started_at = time.monotonic() - 3600
            watch._ended(child, 70, was_ready=False)
            assert child.failures == failures
        assert (watch._status, child.due) == (70, None)
        child.started_at = time.monotonic() - 3600
        watch = Supervisor([child], 1.0, give_up_after=2)
        watch._ended(child, 70, was_ready=False)
        assert child.failures == 0

    def test_a_mistake_of_a_person_ends_all(self, processes: Processes) -> None:
        process = processes.python(
            "supervisor", "-c", self.supervise(processes, "raise SystemExit(2)", "import time; time.sleep(600)")
        )
        assert process.wait(60) == 2
        processes.wait_gone()

    def test_a_worker_that_stays_sick_is_given_up_and_the_others_go_on(self, processes: Processes) -> None:
        script = self.supervise(processes, "raise SystemExit(75)", "import time; time.sleep(600)")
        script = script.replace("supervisor.GRACE_S = 1", "supervisor.GRACE_S = 1; supervisor.SICK_WAIT_S = 0.05")
        process = processes.python("supervisor", "-c", script)
        process.wait_line("worker given up.*c0", 30)
        assert process.text.count("starting it with a new engine") == 2
        assert len(process.children()) == 1
        assert process.stop() == 75

    def test_signals_go_to_the_worker_alone_and_its_group_is_cleared(self, processes: Processes) -> None:
        """A worker ends by SIGTERM; the engine process it leaves behind has never seen the signal, and is killed."""
        engine = "import signal,time; signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True)); "
        engine += "print('engine up', flush=True); time.sleep(600)"
        worker = (
            f"import subprocess, sys, signal, time; subprocess.Popen([sys.executable, '-c', {engine!r}]); "
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(600)"
        )
        process = processes.python("supervisor", "-c", self.supervise(processes, worker))
        process.wait_line("engine up")
        assert process.stop() == 0
        assert "told" not in process.text
        processes.wait_gone()

    def test_one_that_does_not_end_is_killed(self, processes: Processes) -> None:
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        deaf += "print('deaf', flush=True); time.sleep(600)"
        process = processes.python("supervisor", "-c", self.supervise(processes, deaf, drain_s=0))
        process.wait_line("^deaf$")
        assert process.stop(20) == 1
        assert "did not end in time" in process.text
        processes.wait_gone()

    def test_a_signal_during_backoff_ends_it(self, processes: Processes) -> None:
        script = self.supervise(processes, "raise SystemExit(1)").replace("BACKOFF_S = 0.05", "BACKOFF_S = 30")
        process = processes.python("supervisor", "-c", script)
        process.wait_line("starting it again")
        process.signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_worker_started_by_hand_has_no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(parent.SUPERVISOR_PID, raising=False)
    assert parent.supervisor_pid() is None
    assert not parent.orphaned()
    parent.die_with_supervisor()  # and does not ask to die with the shell
    monkeypatch.setenv(parent.SUPERVISOR_PID, str(os.getppid()))
    assert not parent.orphaned()
    monkeypatch.setenv(parent.SUPERVISOR_PID, "1" if os.getppid() != 1 else "2")
    assert parent.orphaned()


def test_help_is_quick_and_loads_no_engine() -> None:
    script = "import sys; from workers.cli import main; sys.argv = ['workers', '-h']\n"
    script += "try: main()\nexcept SystemExit: pass\n"
    script += "print([m for m in ('vllm', 'torch', 'celery', 'kombu', 'numpy') if m in sys.modules])"
    done = subprocess.run([*PYTHON, script], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "models" in done.stdout
    assert "start" in done.stdout
