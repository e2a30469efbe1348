"""Every command of docker-compose.gpu.yml and of the images' CMD, run without a container, as one whole fleet.

There is no container engine here. So each service's command and health check run as they are written, with its
environment and secrets; only paths and host names are put elsewhere, and the engine is the echo engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.brokers import rabbit_server
from tests.support.compose import ROOT, compose, environment, interpolate, stages
from tests.support.ports import free_port, wait_until
from tests.support.processes import Process, Processes

#: What a container finds on its PATH, and what does the same here.
COMMANDS = {
    "producers": f"{shlex.quote(sys.executable)} -m producers",
    "workers": f"{shlex.quote(sys.executable)} -m workers",
    "python": shlex.quote(sys.executable),
    "batchmill-entrypoint": str(ROOT / "docker" / "entrypoint.sh"),
    "batchmill-health": f"{shlex.quote(sys.executable)} {ROOT / 'docker' / 'health.py'}",
    "redis-cli": '/usr/bin/redis-cli -p "$REDIS_PORT"',
    "rabbitmq-diagnostics": "/usr/lib/rabbitmq/bin/rabbitmq-diagnostics",
    # Two GPUs, as the driver's tool lists them.
    "nvidia-smi": "printf 'GPU 0: One (UUID: GPU-a)\\nGPU 1: Two (UUID: GPU-b)\\n' #",
}


class Bare:
    """Services of the compose file as processes of this machine."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self.processes = folder, processes
        self.services: dict[str, Any] = compose()["services"]
        self.ports = {"rabbitmq:5672": free_port(), "redis-state:6379": free_port(), "redis-cache:6379": free_port()}
        self.flower_port = free_port()
        self.extra: dict[str, str] = {}
        self.last_id = ""
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, command in COMMANDS.items():
            (self.bin / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (self.bin / name).chmod(0o755)
        # `nvidia-smi` takes no arguments here.
        (self.bin / "nvidia-smi").write_text(f"#!/bin/sh\n{COMMANDS['nvidia-smi']}\n")
        subprocess.run([ROOT / "docker" / "make-secrets.sh", folder / "made"], check=True, capture_output=True)
        shutil.copytree(ROOT / "config", folder / "config")
        weights = folder / "weights"
        weights.mkdir()
        (weights / "config.json").write_text("{}")
        (folder / "config" / "models.yaml").write_text(
            f"default: smollm2-135m\ncurrent: {{smollm2-135m: '1'}}\nmodels:\n"
            f"  smollm2-135m@1: {{source: {weights}, hardware: {{gpus: 1}}}}\n"
        )

    def secrets(self, name: str) -> Path:
        """The service's /run/secrets."""
        folder = self.folder / name / "secrets"
        folder.mkdir(parents=True, exist_ok=True)
        for secret in self.services[name].get("secrets", []):
            file = Path(compose()["secrets"][secret["source"]]["file"]).name
            text = (self.folder / "made" / file).read_text()
            for host, port in self.ports.items():
                text = text.replace(host, f"127.0.0.1:{port}")
            (folder / Path(secret["target"]).name).write_text(text)
        return folder

    def local(self, name: str, text: str) -> str:
        """A word of the service's command or environment, with the places it names put into our folder."""
        text = interpolate(text, {})
        for there, here in (
            ("/run/secrets", self.secrets(name)),
            ("/etc/batchmill", self.folder / "config"),
            ("/etc/redis.conf", self.folder / name / "redis.conf"),
            ("/data", self.folder / (name if name.startswith("redis") else "data")),
            ("/models", self.folder / "models"),
        ):
            text = re.sub(rf"(?<![\w./]){re.escape(there)}(?![\w-])", str(here), text)
        return text

    def env(self, name: str) -> dict[str, str]:
        service = self.services[name]
        target = service.get("build", {}).get("target")
        stated = (environment(target) if target else {}) | service.get("environment", {})
        found = {k: self.local(name, v) for k, v in stated.items()}
        found |= {
            "PATH": f"{self.bin}:/usr/sbin:/usr/bin:/sbin:/bin",
            "BATCHMILL_SECRETS_DIR": str(self.secrets(name)),
            "BATCHMILL_INFERENCE_ENGINE": "echo",
            "REDIS_PORT": str(self.ports.get(f"{name}:6379", 0)),
            "FLOWER_PORT": str(self.flower_port),
        }
        if name == "flower":
            assert found["FLOWER_ADDRESS"] == "0.0.0.0"
            found["FLOWER_ADDRESS"] = "127.0.0.1"
        return found | self.extra

    def command(self, name: str) -> list[str]:
        service = self.services[name]
        ours = ["batchmill-entrypoint"] if "build" in service else []
        return [self.local(name, w) for w in [*service.get("entrypoint", ours), *service["command"]]]

    def start(self, name: str, *instead: str) -> Process:
        """Start the service's command, or its entrypoint with other arguments, as `docker compose run` does."""
        command = self.command(name)
        if instead:
            command = [*self.services[name]["entrypoint"], *instead]
        return self.processes.start(name, command, self.env(name))

    def typed(self, line: str, folder: Path) -> None:
        """What a reader types after `docker compose run`; `ID` is the batch that was named last.

        Redirections, and what is put in the container's /tmp, end in `folder`.
        """
        words = [self.last_id if word == "ID" else word for word in shlex.split(line.replace("/tmp/", f"{folder}/"))]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        with contextlib.ExitStack() as stack:
            while len(words) > 1 and words[-2] in "<>":
                *words, sign, name = words
                stream, mode = ("stdin", "rb") if sign == "<" else ("stdout", "wb")
                streams[stream] = stack.enter_context(open(folder / name, mode))
            service, *words = words
            entrypoint = self.services["producers"]["entrypoint"]
            if service == "--entrypoint":
                instead, service, *words = words
                entrypoint = [instead]
            assert service == "producers"
            argv = [self.local("producers", w) for w in entrypoint] + words
            env = {**os.environ, **self.env("producers"), "PYTHONPATH": str(ROOT)} | self.processes.marks
            # The image's own folder: its user may not write there either.
            done = subprocess.run(
                argv, cwd="/proc", env=env, stderr=subprocess.PIPE, timeout=120, check=False, **streams
            )
        assert done.returncode == 0, done.stderr.decode()
        named = re.search(rb"batch_[0-9a-z]{26}", done.stdout or b"")
        self.last_id = named[0].decode() if named is not None else self.last_id

    def healthy(self, name: str) -> bool:
        """Run the service's health check once."""
        kind, *test = self.services[name]["healthcheck"]["test"]
        words = [self.local(name, w) for w in test]
        argv = ["sh", "-c", *words] if kind == "CMD-SHELL" else words
        # A health check's environment is the container's: the entrypoint's exports are not in it.
        env = {k: v for k, v in os.environ.items() if k.startswith("LC_")} | self.env(name)
        env |= {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(argv, env=env, capture_output=True, timeout=60, check=False)
        return done.returncode == 0

    def redis(self, name: str) -> Process:
        config = ROOT / compose()["configs"][self.services[name]["configs"][0]["source"]]["file"]
        lines = [self.local(name, line) for line in config.read_text().splitlines()]
        lines += [f"port {self.ports[f'{name}:6379']}", "bind 127.0.0.1"]
        (self.folder / name / "redis.conf").write_text("\n".join(lines) + "\n")
        return self.start(name)

    def wait_healthy(self, name: str, process: Process | None = None) -> None:
        def healthy() -> bool:
            assert process is None or process.alive, f"{name} ended: {process.text}"
            return self.healthy(name)

        wait_until(healthy, 60, f"{name} is healthy", every=0.3)


def run_lines() -> list[str]:
    """What the pages have people run beside the fleet, after `run --rm -T`."""
    pages = "".join((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/cache.md"))
    lines = [line.strip() for line in pages.splitlines() if " run --rm" in line]
    found = [re.fullmatch(r"docker compose -f docker-compose\.gpu\.yml run --rm -T (.*?)( +#.*)?", x) for x in lines]
    assert len(found) == 6
    return [match[1] for match in found if match is not None]


@pytest.fixture
def bare(tmp_path: Path, processes: Processes) -> Bare:
    return Bare(tmp_path, processes)


def test_the_images_run_what_the_compose_file_runs() -> None:
    for name in ("coordinator", "flower"):
        service = compose()["services"][name]
        commands = [line for line in stages()[service["build"]["target"]] if line.startswith("CMD ")]
        assert json.loads(commands[-1][4:]) == service["command"]


def test_the_whole_fleet_runs_by_the_commands_of_the_compose_file(bare: Bare, tmp_path: Path) -> None:
    rabbit = tmp_path / "rabbit"
    rabbit.mkdir()
    conf = (bare.secrets("rabbitmq") / "20-batchmill.conf").read_text()
    password = (bare.folder / "made" / "rabbitmq_password").read_text().strip()
    with rabbit_server(rabbit, conf, f"batchmill:{password}") as server:
        bare.ports["rabbitmq:5672"] = server.port
        bare.ports["rabbitmq:15672"] = server.management_port
        bare.extra = {
            k: v for k, v in server.environment().items() if k.startswith(("RABBITMQ_", "ERL_")) or k == "HOME"
        }
        bare.wait_healthy("rabbitmq")
        bare.extra = {}
        for name in ("redis-state", "redis-cache"):
            bare.wait_healthy(name, bare.redis(name))
        running = [bare.start(name) for name in ("coordinator", "worker-gpu", "worker-cpu", "flower")]
        for name, process in zip(("coordinator", "worker-gpu", "worker-cpu", "flower"), running, strict=True):
            bare.wait_healthy(name, process)
        # One worker process a GPU, and one that sees none.
        text = running[1].text + running[2].text
        for node in ("smollm2-135m.1.gpu0@", "smollm2-135m.1.gpu1@"):
            assert node in text

        file, out = tmp_path / "file.jsonl", tmp_path / "out"
        file.write_text("".join(f'{{"custom_id": "r{n}", "body": {{"prompt": "x {n}"}}}}\n' for n in range(50)))
        submit = bare.start("producers", "submit", str(file), "--output", str(out))
        assert submit.wait(90) == 0, submit.text
        assert len((out / "output.jsonl").read_text().splitlines()) == 50
        for line in run_lines():
            bare.typed(line, tmp_path)
        answers = (tmp_path / "answers.jsonl").read_text().splitlines()
        assert [json.loads(line)["custom_id"] for line in answers] == [f"r{n}" for n in range(50)]
        listed = bare.start("producers")
        assert listed.wait(30) == 0
        assert "completed" in listed.text
        for process in reversed(running):
            process.signal(15)
        for name, process in zip(("coordinator", "worker", "worker", "flower"), running, strict=True):
            assert process.wait(75) == 0, name


def test_health_checks_say_why_not(bare: Bare, tmp_path: Path) -> None:
    for name, why in (
        ("coordinator", "no heartbeat yet"),
        ("flower", "refused"),
    ):
        done = subprocess.run(
            [bare.bin / "batchmill-health", name],
            env=bare.env(name) | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr.startswith("unhealthy: ")
        assert why in done.stderr
