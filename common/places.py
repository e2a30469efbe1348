"""Where things lie on this machine when no setting says otherwise: one home folder, shared by every command."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from common.errors import UsageError
from common.settings import Settings


def home(env: Mapping[str, str] = os.environ) -> Path:
    """`$BATCHMILL_HOME`, else `$XDG_DATA_HOME/batchmill`, else `~/.local/share/batchmill`. Not created here."""
    named = env.get("BATCHMILL_HOME")
    if named:
        return expanded(named).absolute()
    data = env.get("XDG_DATA_HOME")
    try:
        return (Path(data) if data else Path("~/.local/share").expanduser()).absolute() / "batchmill"
    except RuntimeError:
        # A container's user without an entry in its passwd.
        raise UsageError("no home folder is known for this user; set BATCHMILL_HOME") from None


def expanded(text: str) -> Path:
    """A path as a person writes it; `UsageError` where its `~` stands for a home folder that is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{text}: no such home folder is known; write the path in full") from None


def store_url(settings: Settings, env: Mapping[str, str] = os.environ) -> str:
    """The store's folder or URL: `store.url`, else `store/` in the home folder."""
    return settings.store.url or str(home(env) / "store")


def models_dir(settings: Settings, env: Mapping[str, str] = os.environ) -> Path:
    """Where pulled models are kept: `inference.models_dir`, else `models/` in the home folder."""
    named = settings.inference.models_dir
    return expanded(named).absolute() if named else home(env) / "models"


def fleet_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Socket, lock, keys, pids and logs of the embedded fleet: `fleet/` in the home folder."""
    return home(env) / "fleet"


def run_dir(env: Mapping[str, str] = os.environ) -> Path:
    """What workers of this machine leave for their supervisors: `run/` in the home folder."""
    return home(env) / "run"
