"""`workers start`: reads what is wanted, checks it in one line each, and starts a supervisor or a worker in place."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import redis

from common import logs
from common import registry as registry_module
from common import settings as settings_module
from common.errors import Unreachable, UsageError
from common.live import LiveState, state_url
from common.registry import Registry
from common.settings import Settings
from workers import devices, parent

#: Seconds to wait for the broker before giving up; roles of a fleet start in any order.
BROKER_WAIT_S = 30.0


@dataclass(frozen=True)
class Options:
    """The command's options."""

    model: str | None = None
    device_ids: str | None = None
    all_gpus: bool = False
    engine: str | None = None
    name: str | None = None
    supervised: bool = True
    #: Failures in a row after which the supervisor ends too; 0: never.
    give_up_after: int = 0


def start(options: Options, env: Mapping[str, str] = os.environ) -> int:
    """Run to the end; returns the exit status. `BatchmillError` for what a person can put right."""
    settings = read_settings(options, env)
    registry = registry_module.load(env=env)
    model = registry.resolve(options.model or settings.inference.default_model)
    logs.configure(settings.telemetry, "worker" if not options.supervised else "supervisor")
    groups = device_groups(options, settings, registry, model, env)
    names = [_label(options, group, len(groups)) for group in groups]
    check_settings(settings)
    if options.supervised:
        from common.broker import broker_url
        from workers import breadcrumb, supervisor
        from workers.crash_report import Reporter

        wait_for_broker(settings)
        nodes = [devices.node_name(model, name) for name in names]
        refuse_twins(settings, nodes)
        children = [
            supervisor.Child(
                node, _argv(options, model, name), _pinned(group), breadcrumb.path_of(broker_url(settings), node, env)
            )
            for group, name, node in zip(groups, names, nodes, strict=True)
        ]
        return supervisor.Supervisor(
            children, settings.inference.drain_s, options.give_up_after, Reporter(settings)
        ).run()
    if len(groups) != 1:
        raise UsageError("--no-supervisor runs one worker: name the GPUs of one group with --device-ids")
    os.environ.update(_pinned(groups[0]))
    parent.die_with_supervisor()
    from workers import process

    return process.run(settings, registry, model, devices.node_name(model, names[0]))


def read_settings(options: Options, env: Mapping[str, str]) -> Settings:
    """The settings with `--engine` over them."""
    given = dict(env)
    if options.engine is not None:
        given["BATCHMILL_INFERENCE_ENGINE"] = options.engine
        os.environ["BATCHMILL_INFERENCE_ENGINE"] = options.engine
    return settings_module.load(env=given)


def device_groups(
    options: Options, settings: Settings, registry: Registry, model: str, env: Mapping[str, str]
) -> list[devices.Group]:
    """The GPU groups to serve on; `UsageError` when this machine has not what the model needs."""
    size = registry.get(model).hardware.gpus
    if options.device_ids is not None:
        return devices.group(devices.parse_ids(options.device_ids), size)
    if options.all_gpus:
        found = devices.visible_gpus(env)
        if not found:
            raise UsageError("--all-gpus: no GPU found on this machine (nvidia-smi lists none)")
        return devices.group(found[: len(found) - len(found) % max(size, 1)] or found, size)
    if settings.inference.device_ids:
        return devices.group([str(i) for i in settings.inference.device_ids], size)
    if size == 0 or settings.inference.engine == "echo":
        return devices.group([], 0)
    return devices.group(devices.visible_gpus(env)[:size], size)


def check_settings(settings: Settings) -> None:
    """What a worker cannot do without; `UsageError` names it."""
    from common.broker import broker_url, codecs

    broker_url(settings)
    state_url(settings)
    codecs(settings)


def wait_for_broker(settings: Settings) -> None:
    """Return once the broker answers; `Unreachable` when it does not in time."""
    from common.broker import connect

    deadline = time.monotonic() + BROKER_WAIT_S
    told = False
    while True:
        try:
            connect(settings).release()
        except Unreachable as exc:
            if not told:
                told = True
                sys.stderr.write(f"workers: {exc}; waiting up to {BROKER_WAIT_S:g} s for it\n")
                sys.stderr.flush()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


def refuse_twins(settings: Settings, nodes: list[str]) -> None:
    """`UsageError` when a worker of one of these names runs on this machine: they would answer for each other."""
    live = LiveState(settings)
    try:
        running = live.workers()
    except (redis.RedisError, OSError):
        # Nothing known, so nothing to hold against it.
        return
    finally:
        live.close()
    for other in running:
        if other.node in nodes and other.host == socket.gethostname() and _is_worker(other.pid):
            raise UsageError(
                f"a worker named {other.node} runs here already (process {other.pid}); "
                "give this one other GPUs (--device-ids) or another name (--name)"
            )


def _is_worker(pid: int) -> bool:
    # A killed worker's word outlives it by some seconds, and its number may belong to somebody else by then.
    try:
        return b"workers" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _label(options: Options, group: devices.Group, groups: int) -> str:
    if options.name is None:
        return group.label
    name = devices.check_name(options.name)
    return name if groups == 1 else f"{name}-{group.label}"


def _argv(options: Options, model: str, name: str) -> list[str]:
    argv = [sys.executable, "-m", "workers", "start", "--no-supervisor", "--model", model, "--name", name]
    return [*argv, "--engine", options.engine] if options.engine is not None else argv


def _pinned(group: devices.Group) -> dict[str, str]:
    """The child's environment: it sees its own GPUs alone, and takes all that it sees."""
    if not group.devices:
        return {"BATCHMILL_INFERENCE_DEVICE_IDS": ""}
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(group.devices),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "BATCHMILL_INFERENCE_DEVICE_IDS": "",
    }
