"""vLLM's arguments out of models.yaml and the settings, checked by vLLM's own parser before anything is loaded."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any, NoReturn

from common import engine_arguments
from common.errors import UsageError
from common.registry import ModelVersion
from common.settings import Settings
from workers.models import source as sources


def engine_values(
    model_version: str, entry: ModelVersion, settings: Settings, folder: Path, *, cpu: bool
) -> dict[str, Any]:
    """vLLM's arguments by their Python names. What the model's entry says goes before the fleet's settings."""
    inference = settings.inference
    values: dict[str, Any] = {
        "enable_prompt_tokens_details": True,
        "max_num_seqs": inference.batch_size,
        "max_model_len": inference.max_seq_len,
    }
    if cpu:
        # Said by argument, not by VLLM_CPU_KVCACHE_SPACE, which takes whole GiB only.
        values["kv_cache_memory_bytes"] = int(entry.hardware.cpu_kv_gb * (1 << 30))
    else:
        values["gpu_memory_utilization"] = inference.gpu_memory_utilization
        values["tensor_parallel_size"] = max(1, entry.hardware.gpus)
    values |= {key.replace("-", "_"): value for key, value in entry.engine.items()}
    transfer = engine_arguments.transfer_config(values)
    if transfer is not None or values.get("kv_offloading_size") is not None:
        # vLLM's default is to fail a request whose offloaded blocks cannot be read back; it can compute them again.
        values["kv_transfer_config"] = {"kv_load_failure_policy": "recompute"} | (transfer or {})
    name = model_version.partition("@")[0]
    source = sources.parse(entry.source, model_version)
    names = [model_version, name, *([source.repo] if isinstance(source, sources.Hub) else [])]
    values |= {"model": str(folder), "served_model_name": names}
    return {key: value for key, value in values.items() if value is not None}


def parse(model_version: str, values: dict[str, Any]) -> Namespace:
    """The arguments as vLLM's server parses them; a fresh object each time, since building an engine changes it.

    `UsageError` names the key that vLLM does not know or the value it does not take.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.version import __version__ as vllm_version

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is not typed here
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"model {model_version}: vLLM refuses its engine arguments: {message}")

    parser = make_arg_parser(Parser(prog="vllm", allow_abbrev=False))
    known = parser._option_string_actions
    words: list[str] = []
    for key, value in values.items():
        flag = "--" + key.replace("_", "-")
        if flag not in known:
            raise UsageError(f"model {model_version}: engine.{key}: vLLM {vllm_version} has no such argument")
        words += _words(flag, value, known)
    args: Namespace = parser.parse_args(words)
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as exc:
        raise UsageError(f"model {model_version}: vLLM refuses its engine arguments: {exc}") from None
    return args


def _words(flag: str, value: Any, known: dict[str, Any]) -> list[str]:
    """One argument as on a command line."""
    if isinstance(value, bool):
        if value:
            return [flag]
        negative = "--no-" + flag.removeprefix("--")
        return [negative] if negative in known else []
    if isinstance(value, list):
        return [flag, *(json.dumps(item) if isinstance(item, (dict, list)) else str(item) for item in value)]
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    return [f"{flag}={value}"]
