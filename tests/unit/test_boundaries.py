"""The borders between the packages, read off the source: who may import whom."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from common.store import LocalStore
from producers.batch import read_batch
from tests.support import stored

ROOT = Path(__file__).resolve().parents[2]

#: package → modules it may never import, anywhere.
FORBIDDEN = {
    "common": {"producers", "workers", "vllm", "torch", "tests"},
    "producers": {"workers", "vllm", "torch", "tests"},
    "workers": {"producers", "tests"},
}
#: Heavy modules stay inside these folders.
HEAVY = {"vllm", "torch", "transformers"}
HEAVY_HOMES = ("workers/engine/", "workers/preflight/", "workers/models/")
#: What an engine brings, or an environment of its own has, and `make lint` must do without.
NOT_FOR_LINT = HEAVY | {"gguf", "accelerate", "ray"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no source in {package}"
    return found


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_a_package_imports_no_other_side(package: str) -> None:
    wrong = {str(p.relative_to(ROOT)): sorted(imports(p) & FORBIDDEN[package]) for p in sources(package)}
    assert {k: v for k, v in wrong.items() if v} == {}


def test_heavy_imports_stay_at_home() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources("workers")
        if imports(path) & HEAVY and not str(path.relative_to(ROOT)).startswith(HEAVY_HOMES)
    ]
    assert wrong == []


def test_the_types_are_checked_where_there_is_no_engine() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    missing = {
        name.removesuffix(".*") for o in tool["overrides"] if o.get("ignore_missing_imports") for name in o["module"]
    }
    used = {name for package in tool["packages"] for path in sources(package) for name in imports(path)}
    assert used & NOT_FOR_LINT >= HEAVY
    assert (used & NOT_FOR_LINT) - missing == set()


#: What no short command is to import: each would be a good part of its time.
SLOW = {
    *("celery", "kombu", "redis", "vllm", "torch", "numpy", "rich", "pydantic", "zstandard", "fsspec"),
    *("prometheus_client", "structlog", "tenacity"),
}


def imported(module: str, *argv: str, env: Mapping[str, str] | None = None) -> tuple[set[str], str]:
    """The top-level modules that a command imports which ends well, and what it prints."""
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['x', *{argv!r}]\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as exc: assert not exc.code, exc.code\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=None if env is None else {**os.environ, **env},
    )
    return set(run.stderr.splitlines()[-1].split()), run.stdout


@pytest.mark.parametrize(("module", "banned"), [("producers.__main__", SLOW), ("workers.__main__", {"vllm", "torch"})])
def test_help_needs_nothing_heavy(module: str, banned: set[str]) -> None:
    found, said = imported(module, "--help")
    assert found & banned == set()
    assert "Usage" in said


def test_a_small_batch_is_stored_and_looked_at_without_what_is_slow_to_import(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    stored.heartbeat(store, time.time())
    file = tmp_path / "file.jsonl"
    body = {"messages": [{"role": "user", "content": "hello"}]}
    file.write_text("".join(json.dumps({"custom_id": str(n), "body": body}) + "\n" for n in range(300)))
    (tmp_path / "fleet.yaml").write_text("{}")
    (tmp_path / "models.yaml").write_text("default: m@1\nmodels: {m@1: {source: /nowhere}}")
    env = {
        "BATCHMILL_CONFIG": str(tmp_path / "fleet.yaml"),
        "BATCHMILL_MODELS": str(tmp_path / "models.yaml"),
        "BATCHMILL_STORE_URL": store.url,
        "BATCHMILL_BROKER_URL": "redis://127.0.0.1:1/0",
    }
    found, said = imported("producers", "submit", str(file), "--detach", "--output", str(tmp_path), env=env)
    assert found & SLOW == set()
    batch_id = said.strip()
    assert read_batch(store, batch_id).planned == 300
    found, said = imported("producers", "status", batch_id, "--json", env=env)
    assert found & SLOW == set()
    assert json.loads(said)["request_counts"]["total"] == 300
