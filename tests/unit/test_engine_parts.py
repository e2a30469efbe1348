"""The parts of the vLLM engine that need no vLLM: aborts, log privacy, sockets, arguments, the plug-in's metadata."""

from __future__ import annotations

import asyncio
import configparser
import io
import logging
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common import settings as settings_module
from common.registry import Hardware, ModelVersion
from workers.engine import aborts, cpu_threads, parent_death, privacy, sockets
from workers.engine.arguments import engine_values

ROOT = Path(__file__).resolve().parents[2]


class Llm:
    """Stands for `AsyncLLM`."""

    def __init__(self) -> None:
        self.closed = 0

    async def generate(self, *reasons: str | None) -> AsyncIterator[Any]:
        try:
            for reason in reasons:
                yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason)])
        finally:
            self.closed += 1

    async def encode(self, *sizes: int) -> AsyncIterator[Any]:
        for size in sizes:
            yield SimpleNamespace(finished=True, outputs=SimpleNamespace(data=SimpleNamespace(numel=lambda n=size: n)))


@pytest.mark.parametrize(("reasons", "aborted"), [(("stop",), False), ((None, "length"), False), (("abort",), True)])
def test_aborted_generation_is_seen_through_tasks(reasons: tuple[str | None, ...], aborted: bool) -> None:
    async def consume(llm: Any) -> list[Any]:
        return [output async for output in llm.generate(*reasons)]

    async def main() -> bool:
        llm = Llm()
        aborts.observe(llm)
        with aborts.watching() as watch:
            # vLLM's handlers run in tasks of their own.
            outputs = await asyncio.create_task(consume(llm))
        assert len(outputs) == len(reasons)
        with aborts.watching() as other:
            pass
        assert not other.aborted
        return watch.aborted

    assert asyncio.run(main()) is aborted


@pytest.mark.parametrize(("size", "aborted"), [(64, False), (0, True)])
def test_empty_embedding_is_an_abort(size: int, aborted: bool) -> None:
    async def main() -> bool:
        llm: Any = Llm()
        aborts.observe(llm)
        with aborts.watching() as watch:
            async for _ in llm.encode(size):
                pass
        return watch.aborted

    assert asyncio.run(main()) is aborted


def test_observer_closes_the_generator_it_wraps() -> None:
    async def main() -> int:
        llm: Any = Llm()
        aborts.observe(llm)
        outputs = llm.generate(None, None)
        await anext(outputs)
        await outputs.aclose()
        return int(llm.closed)

    assert asyncio.run(main()) == 1


@pytest.fixture
def vllm_log() -> Any:
    """vLLM's logger as vLLM sets it up, writing to a buffer."""
    logger, stream = logging.getLogger("vllm"), io.StringIO()
    handler = logging.StreamHandler(stream)
    kept, propagate, level = logger.handlers[:], logger.propagate, logger.level
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    privacy.guard_logs()
    privacy.guard_logs()
    assert len(handler.filters) == 1
    yield stream
    logger.handlers, logger.propagate = kept, propagate
    logger.setLevel(level)


def test_prompts_stay_out_of_the_log(vllm_log: io.StringIO) -> None:
    handlers = logging.getLogger("vllm.entrypoints.anthropic.api_router")
    for _ in range(3):
        try:
            raise ValueError("the SECRET prompt")
        except ValueError as exc:
            handlers.exception("Error in create_messages: %s", exc)
    logging.getLogger("vllm.logging_utils.dump_input").error("Dumping scheduler output: [SECRET]")
    logging.getLogger("vllm.v1.engine.core").error("EngineCore encountered a fatal error.")
    lines = vllm_log.getvalue().splitlines()
    # Once for three of the same place; the engine's own line is whole.
    assert len(lines) == 2
    assert "SECRET" not in vllm_log.getvalue()
    assert "(ValueError); text left out" in lines[0]
    assert lines[1] == "EngineCore encountered a fatal error."


_HOLDER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from workers.engine.sockets import SocketFolder
print(SocketFolder.make().path, flush=True)
sys.stdin.read()
"""


def test_sockets_of_dead_processes_are_swept(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = short_tmp / "sockets"
    base.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(base))
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")
    argv = [sys.executable, "-c", _HOLDER, str(base)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            theirs = Path(other.stdout.readline().strip())
            first = sockets.SocketFolder.make()
            # Nor would the folder of a process that cannot be seen from here be taken: nothing asks for its pid.
            assert theirs.exists()
        finally:
            other.kill()
    second = sockets.SocketFolder.make()
    assert not theirs.exists()
    assert first.path.exists()
    assert second.path.parent == base
    assert second.path.stat().st_mode & 0o777 == 0o700
    assert os.environ["VLLM_RPC_BASE_PATH"] == str(second.path)
    second.remove()
    assert not second.path.exists()
    assert "VLLM_RPC_BASE_PATH" not in os.environ
    first.remove()
    assert list(base.iterdir()) == []


def test_a_socket_folder_that_was_swept_before_it_was_locked_is_made_anew(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_tmp))
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")
    made: list[Path] = []
    mkdtemp = tempfile.mkdtemp

    def swept(*, prefix: str, dir: Path) -> str:
        path = mkdtemp(prefix=prefix, dir=dir)
        made.append(Path(path))
        if len(made) == 1:
            os.rmdir(path)
        return path

    monkeypatch.setattr("tempfile.mkdtemp", swept)
    folder = sockets.SocketFolder.make()
    assert (len(made), folder.path) == (2, made[1])
    folder.remove()


def test_long_temporary_folder_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")
    folder = sockets.SocketFolder.make()
    try:
        assert len(str(folder.path)) + 37 < 107
    finally:
        folder.remove()


def values(entry: ModelVersion, cpu: bool = False, **inference: str) -> dict[str, Any]:
    env = {f"BATCHMILL_INFERENCE_{name.upper()}": value for name, value in inference.items()}
    return engine_values("m@1", entry, settings_module.load(env=env), Path("/models/m"), cpu=cpu)


def test_arguments_on_gpus() -> None:
    entry = ModelVersion(source="hf:org/name@1", hardware=Hardware(gpus=2))
    found = values(entry, batch_size="64", max_seq_len="4096", gpu_memory_utilization="0.8")
    assert found == {
        "enable_prompt_tokens_details": True,
        "max_num_seqs": 64,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.8,
        "tensor_parallel_size": 2,
        "model": "/models/m",
        "served_model_name": ["m@1", "m", "org/name"],
    }


def test_arguments_on_a_cpu_take_fractions_of_a_gigabyte() -> None:
    entry = ModelVersion(source="/m", hardware=Hardware(gpus=0, cpu_kv_gb=0.5))
    found = values(entry, cpu=True, gpu_memory_utilization="0.8")
    assert found["kv_cache_memory_bytes"] == 1 << 29
    assert found["served_model_name"] == ["m@1", "m"]
    assert not {"gpu_memory_utilization", "tensor_parallel_size"} & found.keys()


def test_model_entry_goes_before_the_settings() -> None:
    entry = ModelVersion(source="/m", engine={"max-num-seqs": 8, "tensor_parallel_size": 4, "dtype": None})
    found = values(entry, batch_size="64")
    assert (found["max_num_seqs"], found["tensor_parallel_size"]) == (8, 4)
    assert "dtype" not in found


def test_what_cannot_be_read_back_from_host_memory_is_computed_again() -> None:
    policy = {"kv_load_failure_policy": "recompute"}
    offload = ModelVersion(source="/m", engine={"kv-offloading-size": 8})
    assert values(offload)["kv_transfer_config"] == policy
    named = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}
    own = ModelVersion(source="/m", engine={"kv_transfer_config": named})
    assert values(own)["kv_transfer_config"] == policy | named
    strict = ModelVersion(source="/m", engine={"kv_transfer_config": named | {"kv_load_failure_policy": "fail"}})
    assert values(strict)["kv_transfer_config"]["kv_load_failure_policy"] == "fail"
    assert "kv_transfer_config" not in values(ModelVersion(source="/m"))


def test_all_of_a_few_cores_compute() -> None:
    env: dict[str, str] = {}
    assert cpu_threads.use_all_cores(env, 2)
    # Waiting threads sleep: spinning, they would stand still beside anything else that wants a core.
    assert env == {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "OMP_WAIT_POLICY": "passive"}


@pytest.mark.parametrize(
    ("cores", "env"),
    [
        (5, {}),
        (2, {"VLLM_CPU_OMP_THREADS_BIND": "auto"}),
        (2, {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}),
        (2, {"OMP_NUM_THREADS": "1"}),
        (2, {"OMP_WAIT_POLICY": "active"}),
        (2, {"LD_PRELOAD": "/usr/lib/libiomp5.so"}),
    ],
)
def test_threads_are_left_to_vllm_or_to_who_placed_them(cores: int, env: dict[str, str]) -> None:
    before = dict(env)
    assert not cpu_threads.use_all_cores(env, cores)
    assert env == before


def entry_point(text: str) -> str:
    parsed = configparser.ConfigParser()
    parsed.read_string(text)
    return parsed[parent_death.GROUP][parent_death.NAME]


def test_plugin_of_a_checkout_is_the_installed_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = project["entry-points"][parent_death.GROUP][parent_death.NAME]
    found: list[Distribution] = list(distributions(path=[str(ROOT / "workers" / "engine" / "plugin")]))
    assert [d.metadata["Name"] for d in found] == ["batchmill-plugin"]
    assert entry_point(found[0].read_text("entry_points.txt") or "") == installed
    assert installed == f"{parent_death.install.__module__}:install"


#: Starts a child as vLLM does (spawned, plug-ins loaded by entry point), and one below that, and tells their ids.
PARENT = """
import multiprocessing, os, sys, time
from importlib.metadata import entry_points

def load_plugins():
    for plugin in entry_points(group="vllm.general_plugins"):
        if plugin.name == "batchmill_parent_death":
            plugin.load()()

def worker(pipe):
    load_plugins()
    pipe.send((os.getpid(), os.getpgid(0)))
    time.sleep(600)

def engine(pipe):
    load_plugins()
    pipe.send((os.getpid(), os.getpgid(0)))
    process = multiprocessing.get_context("spawn").Process(target=worker, args=(pipe,), daemon=True)
    process.start()
    time.sleep(600)

if __name__ == "__main__":
    from workers.engine import parent_death
    parent_death.own_engine()
    load_plugins()  # in the owner it must do nothing
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(far,))
    process.start()
    print(os.getpid(), os.getpgid(0), *near.recv(), *near.recv(), flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
@pytest.mark.parametrize("leads_session", [True, False])
def test_children_die_with_a_killed_parent(processes: Any, tmp_path: Path, leads_session: bool) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    # `sh -c` in between keeps the parent from leading its session, as in a terminal.
    argv = [sys.executable, str(script)]
    parent = processes.start("parent", argv if leads_session else ["sh", "-c", '"$@" & wait', "sh", *argv])
    line = parent.wait_line(r"^\d+( \d+){5}$", 60)
    pid, group, engine, engine_group, worker, worker_group = map(int, line.group().split())
    assert {engine, worker} <= {p.pid for p in processes.survivors()}
    if leads_session:
        assert engine_group == worker_group == group
    else:
        # A Ctrl-C goes to the whole group of the terminal; the engine is no longer in it.
        assert engine_group == worker_group == engine != group
    os.kill(pid, 9)
    processes.wait_gone(5)
