"""Files of the embedded fleet, all below one folder that only its owner may enter."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from common import places
from common.errors import UsageError

#: A Unix socket's path has 108 bytes with its zero byte (unix(7)); Redis makes no temporary name beside it.
_SOCKET_PATH_MAX = 107


@dataclass(frozen=True)
class Layout:
    """Paths below `folder`; nothing is created by asking for them."""

    folder: Path

    @property
    def lock(self) -> Path:
        """Held (exclusive) by the daemon as long as it lives; holds its pid."""
        return self.folder / "fleet.lock"

    @property
    def start_lock(self) -> Path:
        """Held by whoever starts or ends the fleet, so that this happens once at a time."""
        return self.folder / "start.lock"

    @property
    def use_lock(self) -> Path:
        """Held (shared) by every command that follows a batch: while it is, the fleet does not end by itself."""
        return self.folder / "use.lock"

    @property
    def record(self) -> Path:
        """What the daemon says of itself (`record.Record`)."""
        return self.folder / "fleet.json"

    @property
    def settings(self) -> Path:
        """The settings its processes run with; 0600."""
        return self.folder / "settings.yaml"

    @property
    def keys(self) -> Path:
        """Message keys."""
        return self.folder / "keys"

    @property
    def redis(self) -> Path:
        """Redis's append-only file."""
        return self.folder / "redis"

    @property
    def wanted(self) -> Path:
        """One file a model that a command asked for."""
        return self.folder / "wanted"

    @property
    def logs(self) -> Path:
        """One log a process."""
        return self.folder / "logs"

    @property
    def socket(self) -> Path:
        """Redis's socket: in the folder, or under a short name in the runtime folder where that is too long."""
        here = self.folder / "redis.sock"
        if len(os.fsencode(here)) <= _SOCKET_PATH_MAX:
            return here
        name = blake3(os.fsencode(self.folder)).hexdigest()[:16]
        base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        for parent in (base, Path("/tmp")):
            short = parent / f"batchmill-{os.getuid()}" / f"{name}.sock"
            if len(os.fsencode(short)) <= _SOCKET_PATH_MAX:
                return short
        raise UsageError(f"{self.folder}: too long a path for a socket; set BATCHMILL_HOME to a shorter one")

    def create(self) -> None:
        """Make the folders, 0700; `UsageError` when that is not possible or somebody else owns one."""
        for folder in (self.folder, self.keys, self.redis, self.wanted, self.logs, self.socket.parent):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as exc:
                raise UsageError(f"{folder}: cannot be made: {exc.strerror}; set BATCHMILL_HOME") from None
            found = folder.lstat()
            # In /tmp anybody could have been there first, and would then own the door to our prompts.
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise UsageError(f"{folder}: belongs to somebody else; set BATCHMILL_HOME to a folder of your own")
            if found.st_mode & 0o077:
                folder.chmod(0o700)


def layout(env: Mapping[str, str] = os.environ) -> Layout:
    """The layout of this user's fleet."""
    return Layout(places.fleet_dir(env))
