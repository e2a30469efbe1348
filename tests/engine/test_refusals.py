"""Engines that cannot start: one line that says why, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from common.errors import BatchmillError, UsageError
from common.registry import Hardware, ModelVersion
from common.settings import Settings
from tests.engine import tiny_models
from tests.engine.conftest import Running, tiny
from workers.engine import arguments

pytestmark = [pytest.mark.engine, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.embedding_model(tmp_path_factory.mktemp("tiny") / "embedding")


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"max_model_lenn": 5}, r"engine\.max_model_lenn: vLLM .* has no such argument"),
        ({"max_num_seqs": "many"}, "argument --max-num-seqs: "),
        ({"dtype": "float7"}, "argument --dtype: invalid choice"),
        ({"enable_auto_tool_choice": True}, "requires --tool-call-parser"),
    ],
)
def test_wrong_arguments(settings: Settings, engine: dict[str, object], words: str) -> None:
    entry = ModelVersion(source="/m", engine=engine)
    with pytest.raises(UsageError, match=f"model m@1: .*{words}") as error:
        arguments.parse("m@1", arguments.engine_values("m@1", entry, settings, Path("/m"), cpu=True))
    assert "\n" not in str(error.value)


def test_arguments_of_every_kind(settings: Settings) -> None:
    engine = {
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "max_num_seqs": 3,
        "hf_overrides": {"a": {"b": 1}},
        "compilation_config": {"mode": 0},
        "lora_modules": [{"name": "x", "path": "/x"}],
        "kv_offloading_size": 4,
        "kv_transfer_config": {"kv_connector_extra_config": {"spec": {"nested": [1]}}},
    }
    entry = ModelVersion(source="hf:org/name@1", engine=engine)
    args = arguments.parse("m@1", arguments.engine_values("m@1", entry, settings, Path("/m"), cpu=True))
    assert (args.enable_prefix_caching, args.enforce_eager, args.max_num_seqs) == (False, True, 3)
    assert args.hf_overrides == {"a": {"b": 1}}
    assert [lora.name for lora in args.lora_modules] == ["x"]
    assert args.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert args.kv_transfer_config.kv_connector_extra_config == {"spec": {"nested": [1]}}
    assert (args.model, args.served_model_name) == ("/m", ["m@1", "m", "org/name"])
    assert args.enable_prompt_tokens_details
    assert not args.enable_log_requests


def check_refused(
    entry: ModelVersion, settings: Settings, error: type[BatchmillError], words: str, name: str = "refused@1"
) -> None:
    with pytest.raises(error, match=words) as raised:
        Running(name, entry, settings)
    assert "\n" not in str(raised.value)
    assert [p.name() for p in psutil.Process().children(recursive=True) if p.name().startswith("VLLM")] == []


def test_offload_that_this_machine_cannot_do_is_refused_before_anything_is_loaded(
    tiny_settings: Settings, model: Path
) -> None:
    entry = msgspec.structs.replace(tiny(model), engine={"kv_offloading_size": 1, "runner": "pooling"})
    check_refused(entry, tiny_settings, UsageError, r"engine\.kv_offloading_size: .*cpu_kv_gb")


def test_context_longer_than_the_model_has(tiny_settings: Settings, model: Path) -> None:
    entry = msgspec.structs.replace(tiny(model), engine={"max_model_len": 100_000, "runner": "pooling"})
    check_refused(entry, tiny_settings, UsageError, "vLLM refuses it: .*max_model_len")


def test_more_memory_than_there_is(tiny_settings: Settings, model: Path) -> None:
    entry = msgspec.structs.replace(tiny(model), hardware=Hardware(gpus=0, cpu_kv_gb=1e6))
    check_refused(entry, tiny_settings, UsageError, "memory is short")


def test_weights_that_are_cut_short(tiny_settings: Settings, tmp_path: Path) -> None:
    """Found out in the engine's own process, as most reasons are."""
    folder = tiny_models.embedding_model(tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    check_refused(tiny(folder), tiny_settings, BatchmillError, "model cut@1: the engine did not start: ", "cut@1")


def test_command_names_every_problem_and_exits_2(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(
        f"default: m\nmodels:\n  m@1:\n    source: {tmp_path}/none\n    hardware: {{gpus: 64}}\n"
        "    engine: {max_num_seq: 4}\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
    env |= {"BATCHMILL_MODELS": str(tmp_path / "models.yaml"), "PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-m", "workers", "check", "--json"]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    found = {f["check"]: f for f in msgspec.json.decode(done.stdout)}
    assert done.returncode == 2
    assert found["model"]["level"] == "problem"
    assert "none is not a folder" in found["model"]["text"]
    assert found["devices"]["level"] == "problem"
    assert found["engine"]["level"] == "problem"
    assert "engine.max_num_seq: vLLM" in found["engine"]["text"]
