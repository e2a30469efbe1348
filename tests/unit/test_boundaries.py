"""The borders between the packages, read off the source: who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("producers.__main__", ["celery", "kombu", "vllm", "torch", "numpy.random"]),
        ("workers.__main__", ["vllm", "torch"]),
    ],
)
def test_help_needs_nothing_heavy(module: str, banned: list[str]) -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as exc: assert not exc.code, exc.code\n"
        f"print([m for m in {banned!r} if m in sys.modules], file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert run.stderr.splitlines()[-1] == "[]"
    assert "Usage" in run.stdout
