"""How a batch comes to be in the store: not at all, or whole.

1. `incoming/<id>.lock` says that an intake is at work (on a local disk it is held with flock, which ends with the
   process, however that ends).
2. The files are written to `incoming/<id>/` on a local disk, straight to `batches/<id>/` on an object store, where they
   do not count before `batch.json` is there.
3. With an idempotency key, `keys/<hash>` is created exclusively, holding the `Batch`. Whoever comes second finds it.
4. `incoming/<id>/` becomes `batches/<id>/` by one rename; on an object store `batch.json` is written. From here on the
   batch exists.
5. `active/<shard>/<id>` lets the coordinator find it; then the lock goes.

A kill before 3 (or 4 without a key) leaves nothing that counts, and `recover` clears it away. A kill after that leaves
a whole batch, which `recover` brings to its end. Submits call it, and coordinators call it once a minute.
A disk that fills up, or a service that fails, at 4 or 5 takes the batch back, unless it has a key: then repeating the
submit, or recovery, completes it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import msgspec
from blake3 import blake3

from common.errors import Damaged, Unreachable
from common.ids import created_at, is_batch_id, new_batch_id
from common.store import FileGroup, LocalStore, Store
from producers.batch import Batch, folder

INCOMING = "incoming"
_LOCK = ".lock"

#: Seconds after which an intake into an object store counts as dead when it has not come to its end.
DEAD_AFTER_S = 24 * 3600.0


def shard_of(batch_id: str, shards: int) -> int:
    """The coordinator shard of a batch: a stable hash of its id."""
    return int.from_bytes(blake3(batch_id.encode()).digest(8), "little") % shards


def key_path(key: str) -> str:
    """Where an idempotency key is kept."""
    return f"keys/{blake3(key.encode()).hexdigest()}"


class Spool:
    """A batch in the making. Leaving the block without `publish` removes all that was written.

    `files`: a group that the batch's files are written into, with those of others; `publish_all` then publishes it.
    """

    def __init__(self, store: Store, files: FileGroup | None = None) -> None:
        self.id = new_batch_id()
        self.store = store
        #: What files are written to.
        self.files: Store | FileGroup = store if files is None else files
        self._lock: int | None = None
        self._lock_path = f"{INCOMING}/{self.id}{_LOCK}"
        self._done = False
        #: The folder in the store that files are written to.
        self.folder = f"{INCOMING}/{self.id}" if isinstance(store, LocalStore) else folder(self.id)

    def __enter__(self) -> Self:
        if isinstance(self.store, LocalStore):
            self._lock = self.store.create_locked(self._lock_path, sync=self.files is self.store)
        else:
            self.store.put_atomic(self._lock_path, b"")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._done:
                self.store.delete(self.folder)
                self.store.delete(self._lock_path)
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def publish(self, batch: Batch) -> Batch:
        """Make the batch visible and active; the batch that has its idempotency key already, where there is one."""
        self.store.put_atomic(_whole_path(self.store, batch.id), encode_batch(batch))
        if batch.idempotency_key is not None:
            path = key_path(batch.idempotency_key)
            while not self.store.create_exclusive(path, encode_batch(batch)):
                earlier = find_by_key(self.store, batch.idempotency_key)
                if earlier is not None:
                    return earlier
            # Others may have found it under its key by now: should the rest fail, it is brought to its end later.
            self._done = True
        try:
            finish(self.store, batch)
        except BaseException:
            if not self._done:
                self.withdraw(batch)
            raise
        self._done = True
        return batch

    def published(self) -> None:
        """The batch is active: all of it stays, but for its lock."""
        self._done = True
        with contextlib.suppress(Unreachable):  # the batch is there; recovery takes the lock away
            self.store.delete(self._lock_path)

    def withdraw(self, batch: Batch) -> None:
        """Make a batch invisible again, as its submitter will be told that it failed."""
        # Until this is through, the lock must stay: a batch without it would be lost for good.
        self._done = True
        self._take_back(batch)
        self._done = False

    def _take_back(self, batch: Batch) -> None:
        self.store.delete(f"active/{batch.shard}/{batch.id}")
        if isinstance(self.store, LocalStore):
            self.store.move(folder(batch.id), self.folder)
        else:
            self.store.delete(f"{folder(batch.id)}/batch.json")


def publish_all(store: LocalStore, made: Sequence[tuple[Spool, Batch]]) -> None:
    """Make batches visible and active whose files, `batch.json` among them, are all written; none has a key."""
    try:
        store.move_all([(spool.folder, folder(batch.id)) for spool, batch in made])
        with store.group(lambda: None) as markers:
            for _, batch in made:
                markers.put(f"active/{batch.shard}/{batch.id}", b"")
    except BaseException:
        for spool, batch in made:
            with contextlib.suppress(Unreachable):
                spool.withdraw(batch)
        raise
    for spool, _ in made:
        spool.published()


def encode_batch(batch: Batch) -> bytes:
    """`batch.json`."""
    return msgspec.json.encode(batch)


def find_by_key(store: Store, key: str) -> Batch | None:
    """The batch that a key stands for, brought to its end if its intake was killed; None: the key is free."""
    try:
        batch = msgspec.json.decode(store.read(key_path(key)), type=Batch)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, ValueError) as exc:
        raise Damaged(f"{store.url}/{key_path(key)}: is damaged: {exc}; delete it or use another key") from None
    if finish(store, batch):
        return batch
    # The batch was deleted since: its key is free again.
    store.delete(key_path(key))
    return None


def release_key(store: Store, key: str, batch_id: str) -> None:
    """Free the key of a batch that is removed, unless it is another's by now."""
    try:
        mine = msgspec.json.decode(store.read(key_path(key)), type=Batch).id == batch_id
    except (FileNotFoundError, msgspec.DecodeError, ValueError):
        return
    if mine:
        store.delete(key_path(key))


def finish(store: Store, batch: Batch) -> bool:
    """Steps 4 and 5, whoever has begun them and however far; False when the batch's files are not there at all."""
    final = folder(batch.id)
    if isinstance(store, LocalStore):
        store.move(f"{INCOMING}/{batch.id}", final)
        if not store.exists(f"{final}/batch.json"):
            return False
    elif not store.exists(f"{final}/batch.json"):
        if not store.exists(f"{final}/plan"):
            return False
        store.put_atomic(f"{final}/batch.json", encode_batch(batch))
    _activate(store, batch)
    with contextlib.suppress(Unreachable):  # the batch is there; recovery takes the lock away
        store.delete(f"{INCOMING}/{batch.id}{_LOCK}")
    return True


def _activate(store: Store, batch: Batch) -> None:
    # A status means that the coordinator has had it: what is active then is for the coordinator to say.
    if not store.exists(f"{folder(batch.id)}/status.json"):
        store.create_exclusive(f"active/{batch.shard}/{batch.id}", b"")


def recover(store: Store) -> None:
    """Clear away what killed intakes left, and bring to their end the batches that were whole.

    Cheap where nothing is left; may be called often, and by several at a time.
    """
    store.sweep(INCOMING, dead_only=True)
    for name in store.list(INCOMING):
        batch_id = name.removesuffix(_LOCK)
        if not name.endswith(_LOCK) or not is_batch_id(batch_id):
            continue
        try:
            batch = msgspec.json.decode(store.read(f"{folder(batch_id)}/batch.json"), type=Batch)
        except (msgspec.DecodeError, ValueError):
            continue  # damaged, which is for the coordinator to say
        except FileNotFoundError:
            with _taken_over(store, batch_id) as dead:
                if dead:
                    _settle(store, batch_id)
        else:
            finish(store, batch)


@contextlib.contextmanager
def _taken_over(store: Store, batch_id: str) -> Iterator[bool]:
    """True when the intake of a batch has ended; on a local disk no two processes are told so at the same time."""
    if not isinstance(store, LocalStore):
        yield time.time() - created_at(batch_id) > DEAD_AFTER_S
        return
    lock = store.try_lock(f"{INCOMING}/{batch_id}{_LOCK}")
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _whole_path(store: Store, batch_id: str) -> str:
    """Where an intake puts `Batch` once all other files are written, and before it claims its idempotency key."""
    if isinstance(store, LocalStore):
        return f"{INCOMING}/{batch_id}/batch.json"
    return f"{INCOMING}/{batch_id}{_LOCK}"


def _settle(store: Store, batch_id: str) -> None:
    """Finish or remove what a dead intake left before its batch was visible."""
    raw = b""
    with contextlib.suppress(FileNotFoundError):
        raw = store.read(_whole_path(store, batch_id))
    # Damaged: nobody was promised what cannot be read.
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        batch = msgspec.json.decode(raw, type=Batch)
        # Whoever repeats the submit finds the key, so the batch must come to be. Without one it was never promised.
        if _holds_key(store, batch):
            finish(store, batch)
            return
    store.delete(f"{INCOMING}/{batch_id}" if isinstance(store, LocalStore) else folder(batch_id))
    store.delete(f"{INCOMING}/{batch_id}{_LOCK}")


def _holds_key(store: Store, batch: Batch) -> bool:
    if batch.idempotency_key is None:
        return False
    try:
        return msgspec.json.decode(store.read(key_path(batch.idempotency_key)), type=Batch).id == batch.id
    except (FileNotFoundError, msgspec.DecodeError, ValueError):
        return False
