"""Message keys of the embedded fleet, made once and kept in files only their owner may read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from common.errors import UsageError
from common.settings import is_key

NAMES = ("dispatch_key", "results_key")


def ensure_keys(folder: Path) -> dict[str, str]:
    """`{"dispatch_key": hex, "results_key": hex}` out of `folder`, made where missing; the start lock is held."""
    found = {}
    for name in NAMES:
        path = key_file(folder, name)
        try:
            with open(path, "x", opener=lambda p, f: os.open(p, f, 0o600)) as file:
                file.write(secrets.token_hex(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            pass
        except OSError as exc:
            raise UsageError(f"{path}: cannot be written: {exc.strerror}") from None
        text = path.read_text("utf-8", "replace").strip()
        if not is_key(text):
            raise UsageError(f"{path}: is not 64 hex digits; remove it and a new key is made")
        found[name] = text
    return found


def key_file(folder: Path, name: str) -> Path:
    """Where a key lies."""
    return folder / name
