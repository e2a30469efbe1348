"""What README.md tells a reader to type, typed: the fleet in five minutes on both brokers, the file, the client.

Changed on the way: the engine (echo), the ports of the brokers, and where `.venv` comes from.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from common import places, settings
from common.registry import load as load_registry
from tests.support.brokers import RabbitServer, missing
from tests.support.ports import free_port
from tests.support.processes import MARK, ROOT, Process, Processes

README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", README, re.MULTILINE | re.DOTALL)


def tagged(tag: str) -> str:
    """The block after `<!-- test: tag -->`."""
    found = re.search(rf"<!-- test: {tag} -->\n```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found is not None, tag
    return found[1]


class Reader:
    """A clone of the project with `.venv` made, in which a reader types."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self.processes = folder, processes
        folder.mkdir()
        for name in ("config", "examples", "docker"):
            (folder / name).symlink_to(ROOT / name)
        venv = folder / ".venv" / "bin"
        venv.mkdir(parents=True)
        (venv / "activate").write_text(f'export PATH="{venv}:$PATH"\n')
        for name in ("producers", "workers"):
            (venv / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {name} "$@"\n')
            (venv / name).chmod(0o755)
        self.port = free_port()
        self.changed = [
            ("6379", str(self.port)),
            ("redis-server --port", "redis-server --bind 127.0.0.1 --port"),
        ]
        self.env = {
            "BATCHMILL_INFERENCE_ENGINE": "echo",
            "BATCHMILL_HOME": str(folder / "home"),
            # Pulled once on a machine, by whoever came first.
            "BATCHMILL_INFERENCE_MODELS_DIR": str(places.models_dir(settings.load(ROOT / "config" / "fleet.yaml"))),
        }

    def text(self, typed: str) -> str:
        for old, new in self.changed:
            typed = typed.replace(old, new)
        return typed

    def start(self, typed: str) -> Process:
        # Job control lives in a terminal; here the last command takes the shell's place.
        return self.processes.start("reader", ["bash", "-ec", self.text(typed)], self.env, self.folder)

    def run(self, typed: str, timeout: float = 300) -> None:
        process = self.start(typed)
        assert process.wait(timeout) == 0, process.text

    def close(self) -> None:
        """End the Redis that the reader left running; it writes over its environment, so nothing else finds it."""
        with contextlib.suppress(redis.ConnectionError), redis.Redis(port=self.port, socket_timeout=30) as client:
            facts: Any = client.info("server")
            os.kill(facts["process_id"], signal.SIGKILL)


@pytest.fixture
def reader(tmp_path: Path, processes: Processes) -> Iterator[Reader]:
    reader = Reader(tmp_path / "clone", processes)
    yield reader
    processes.close()
    reader.close()


def demo_answered(submit: Process, reader: Reader) -> None:
    """The demo went as it should: one refused, all others answered."""
    assert submit.wait(120) == 1, submit.text
    [output] = (reader.folder / "batchmill-out").glob("*/output.jsonl")
    requests = (ROOT / "examples" / "demo.jsonl").read_text().splitlines()
    assert len(output.read_text().splitlines()) == len(requests) - 1
    assert len((output.parent / "errors.jsonl").read_text().splitlines()) == 1


def test_a_real_fleet_on_redis(reader: Reader) -> None:
    if shutil.which("redis-server") is None:
        missing("redis-server", "apt-get install redis-server")
    reader.run(tagged("common"))
    reader.run(tagged("redis"))
    coordinate, work, submit = tagged("redis roles").splitlines()
    coordinator = reader.start(coordinate)
    worker = reader.start(work)
    demo_answered(reader.start(submit), reader)
    for role in (worker, coordinator):
        assert role.alive, role.text


def test_a_real_fleet_on_rabbitmq(reader: Reader, rabbit_process: RabbitServer) -> None:
    if shutil.which("redis-server") is None:
        missing("redis-server", "apt-get install redis-server")
    vhost = rabbit_process.vhost()
    reader.changed.append(("127.0.0.1:5672//", f"127.0.0.1:{rabbit_process.port}/{vhost}"))
    reader.run(tagged("common"))
    reader.run(tagged("redis"))
    reader.run(tagged("rabbitmq"))
    assert "amqp://" in (reader.folder / "fleet" / "env").read_text()
    coordinate, work, submit = tagged("redis roles").splitlines()
    roles = [reader.start(coordinate), reader.start(work)]
    demo_answered(reader.start(submit), reader)
    assert all(role.alive for role in roles)
    rabbit_process.retire(vhost)


def test_your_own_file_and_the_client(reader: Reader, short_tmp: Path) -> None:
    reader.env["BATCHMILL_HOME"] = str(short_tmp / "readme")
    [file] = [b for b in blocks("json") if "q-1" in b]
    (reader.folder / "file.jsonl").write_text(file)
    [typed] = [b for b in blocks("sh") if "producers validate" in b]
    try:
        reader.run(f". .venv/bin/activate\n{typed}")
        [output] = (reader.folder / "batchmill-out").glob("*/output.jsonl")
        assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["q-1", "q-2"]
        [snippet] = blocks("python")
        client = reader.processes.python("client", "-c", snippet, env=reader.env, cwd=reader.folder)
        assert client.wait(90) == 0, client.text
        assert [line.split()[0] for line in client.lines if line[:2] in ("0 ", "1 ")] == ["0", "1"]
    finally:
        reader.run(". .venv/bin/activate; producers fleet down")


def test_the_example_of_a_gpu_model_is_a_valid_registry(tmp_path: Path) -> None:
    [text] = blocks("yaml")
    (tmp_path / "models.yaml").write_text(re.sub(r"^  ", "", text, flags=re.MULTILINE))
    model = load_registry(tmp_path / "models.yaml").get("llama-70b@1")
    assert model.hardware.gpus == model.engine["tensor_parallel_size"] == 4


def test_every_file_the_readme_points_to_is_there() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert len(links) > 5
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_make_target_the_readme_names_is_there() -> None:
    targets = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test", "install", "flower"} <= targets
    for target in targets:
        env = {k: v for k, v in os.environ.items() if k != MARK}
        done = subprocess.run(["make", "-n", target], cwd=ROOT, env=env, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
