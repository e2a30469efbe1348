"""Who leads a shard: epochs in the store, a heartbeat file, and a lock on this host's ledger folder.

The leader of epoch n is whoever created `epochs/<shard>/<n>` and sees no later one. On the same host a dead leader's
lock is free at once, so a restart does not wait; across hosts (or past a leader that hangs) a standby takes over when
the heartbeat has not changed for a time by its own monotonic clock: nobody compares two machines' clocks.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from pathlib import Path

import msgspec

from common.errors import Unreachable
from common.logs import get, why
from common.store import Store
from producers.batch import Heartbeat
from producers.coordinator import manifest, segments
from producers.coordinator.core import Ousted

log = get(__name__)

#: Seconds between heartbeats.
HEARTBEAT_S = 2.0
_POLL_S = 0.2
#: Seconds between a standby's attempts to reach a store that is away.
_AWAY_S = 1.0
#: Epoch files kept; only the last one counts.
_KEPT = 8


class Leadership:
    """One coordinator's claim to a shard."""

    def __init__(
        self, store: Store, shard: int, ledger_folder: Path, takeover_s: float, host: str | None = None
    ) -> None:
        self._store = store
        self._shard = shard
        self._takeover_s = takeover_s
        self._path = f"coordinator/{shard}.json"
        self._epochs = f"epochs/{shard}"
        self._folder = ledger_folder
        self._host = host if host is not None else socket.gethostname()
        #: 0 until this process leads.
        self.epoch = 0
        try:
            ledger_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(ledger_folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as exc:
            raise Unreachable(f"ledger folder {ledger_folder}: cannot be opened: {exc.strerror}") from None

    def acquire(self, stop: threading.Event) -> bool:
        """Wait until this process leads the shard; False when `stop` is set meanwhile."""
        watch = _Watch()
        told = False
        while not stop.is_set():
            try:
                latest, beat = self._latest(), self._heartbeat()
            except (OSError, Unreachable) as exc:
                if not told:
                    raise
                # Nothing was heard since nothing could be: the silence begins anew.
                log.warning("store_trouble", shard=self._shard, error=why(exc))
                watch = _Watch()
                stop.wait(_AWAY_S)
                continue
            silent = watch.silent_for(latest, beat, time.monotonic())
            locked = self._try_lock()
            if (locked and self._is_dead(beat)) or silent > self._takeover_s:
                # The very next epoch, so that of several standbys that saw the same silence one leads.
                if self._create_epoch(max(latest, self._logged()) + 1):
                    self._clear()
                    self.beat()
                    return True
                continue
            if not told:
                log.info("standby", shard=self._shard, leader=beat.host if beat else None)
                told = True
            stop.wait(min(_POLL_S, self._takeover_s / 4))
        return False

    def check(self) -> None:
        """`Ousted` when a later epoch exists; called before anything is sealed, assembled or said.

        As the fence of a group of files it is exact on a local disk: whoever leads later sweeps a batch's folder before
        it writes there, so that a file which was written, but not named, before that leader's epoch never gets a name.
        """
        latest = self._latest()
        if latest > self.epoch:
            raise Ousted(f"shard {self._shard}: epoch {latest} leads now, this was {self.epoch}")

    def beat(self) -> None:
        """Write the heartbeat; `Ousted` when it is another's by now."""
        beat = Heartbeat(epoch=self.epoch, host=self._host, pid=os.getpid(), at=time.time())
        with self._store.group(self.check) as group:
            group.put(self._path, msgspec.json.encode(beat))

    def resign(self) -> None:
        """Let the next one lead at once, wherever it is."""
        try:
            self.check()
            self._store.delete(self._path)
        except (Ousted, Unreachable, OSError) as exc:
            # The heartbeat is another's by now, or a standby has to wait for its silence.
            log.info("resigned_silently", error=why(exc))
        self.close()

    def close(self) -> None:
        """Give the lock back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _is_dead(self, beat: Heartbeat | None) -> bool:
        """True when the leader that a heartbeat tells of was a process of this host and is no more.

        The lock alone says so only of leaders with the same ledger folder.
        """
        if beat is None:
            return True
        if beat.host != self._host:
            return False
        if beat.pid == os.getpid():
            return True  # A container that started again counts its processes from one again.
        try:
            os.kill(beat.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def _create_epoch(self, epoch: int) -> bool:
        body = msgspec.json.encode({"host": self._host, "pid": os.getpid(), "at": time.time()})
        try:
            if not self._store.create_exclusive(f"{self._epochs}/{epoch}", body):
                return False
        except FileNotFoundError:
            return False  # The one who was first has cleared ours away.
        self.epoch = epoch
        log.info("leads", shard=self._shard, epoch=epoch)
        for old in self._known():
            if old <= epoch - _KEPT:
                self._store.delete(f"{self._epochs}/{old}")
        return True

    def _clear(self) -> None:
        """Remove what leaders left that were killed while they wrote here. A leader of another shard whose heartbeat
        is on its way writes the next one.
        """
        for folder in (self._epochs, os.path.dirname(self._path)):
            self._store.sweep(folder)

    def _logged(self) -> int:
        """The last epoch that has written into this ledger: a store that was made anew counts from one again."""
        names = filter(None, map(segments.parse_name, os.listdir(self._folder)))
        return max([name.epoch for name in names] + manifest.epochs(self._folder), default=0)

    def _known(self) -> list[int]:
        return [int(name) for name in self._store.list(self._epochs) if name.isdigit()]

    def _latest(self) -> int:
        return max(self._known(), default=0)

    def _heartbeat(self) -> Heartbeat | None:
        try:
            return msgspec.json.decode(self._store.read(self._path), type=Heartbeat)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            # Written whole or not at all, so damaged: as good as silent.
            return None


class _Watch:
    """For how long nothing was heard of a leader: no new epoch, no other heartbeat."""

    def __init__(self) -> None:
        self._last: tuple[int, Heartbeat | None] = (-1, None)
        self._since = 0.0

    def silent_for(self, epoch: int, beat: Heartbeat | None, now: float) -> float:
        """Seconds since that last changed, as seen from here."""
        if (epoch, beat) != self._last:
            self._last, self._since = (epoch, beat), now
        return now - self._since
