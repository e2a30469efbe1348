"""Which GPUs a worker gets: groups of as many as the model needs, and the name each group gives its worker."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import UsageError

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")


@dataclass(frozen=True)
class Group:
    """The devices of one worker, as `CUDA_VISIBLE_DEVICES` spells them; none on a CPU."""

    devices: tuple[str, ...]
    #: `gpu0`, `gpu0-1`, `cpu0`.
    label: str


def group(devices: list[str], size: int) -> list[Group]:
    """Devices in groups of `size` (0: one worker without a GPU); `UsageError` when they do not come out even."""
    if size == 0 and not devices:
        return [Group((), "cpu0")]
    size = max(size, 1)
    if not devices or len(devices) % size:
        have = ", ".join(devices) or "none"
        raise UsageError(f"the model needs GPUs in groups of {size}, and these are given: {have}; use --device-ids")
    if len(set(devices)) != len(devices):
        raise UsageError(f"a GPU is named twice: {', '.join(devices)}")
    groups = [tuple(devices[i : i + size]) for i in range(0, len(devices), size)]
    return [Group(members, f"gpu{'-'.join(m.removeprefix('GPU-')[:8] for m in members)}") for members in groups]


def parse_ids(text: str) -> list[str]:
    """`0,1` as a list; `UsageError` for anything but numbers."""
    ids = [part.strip() for part in text.split(",") if part.strip()]
    if not ids or not all(part.isdigit() for part in ids):
        raise UsageError(f"--device-ids: '{text}' is not a list of GPU numbers such as 0,1")
    return ids


def visible_gpus(env: Mapping[str, str] = os.environ) -> list[str]:
    """All GPUs of this machine that may be used: `CUDA_VISIBLE_DEVICES` where it is set, else what nvidia-smi lists."""
    limited = env.get("CUDA_VISIBLE_DEVICES")
    if limited is not None:
        return [part.strip() for part in limited.split(",") if part.strip() not in ("", "-1")]
    binary = shutil.which("nvidia-smi", path=env.get("PATH"))
    if binary is None:
        return []
    try:
        listed = subprocess.run([binary, "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU (\d+):", listed, re.MULTILINE)


def node_name(model: str, label: str, host: str | None = None) -> str:
    """`smollm2-135m.1.gpu0@host`: what Flower, leases and the worker's own queue call it."""
    name, _, version = model.partition("@")
    return f"{name}.{version}.{label}@{host or socket.gethostname()}"


def check_name(name: str) -> str:
    """A name given by a person; `UsageError` when it cannot be part of a node's name."""
    if not _NAME.match(name):
        raise UsageError(f"--name: '{name}' may hold letters, digits, - and _, 64 at most")
    return name
