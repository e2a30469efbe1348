"""Is the model on this machine, and is it still what it was? Asked by `workers models verify` and at worker start."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError
from common.registry import ModelVersion
from common.settings import Settings
from workers.models import digest as digests
from workers.models.source import Folder, model_folder, parse, record_file


class Verified(NamedTuple):
    """Where the model lies and its digest (`blake3:<64 hex>`)."""

    folder: Path
    digest: str


def verify(model_version: str, entry: ModelVersion, settings: Settings) -> Verified:
    """Read every file and compare; `UsageError` when the model is missing or differs."""
    return settle(model_version, entry, settings, full=True)


def settle(model_version: str, entry: ModelVersion, settings: Settings, *, full: bool = False) -> Verified:
    """The model's folder and digest, checked against models.yaml or else against what the first pull recorded.

    Files whose size and time of change are as recorded are not read again unless `full`: a worker must not spend
    minutes of its start on reading weights twice. A model without a record gets one here.
    """
    folder = model_folder(model_version, entry, settings)
    overridden = settings.inference.model_path is not None
    present(model_version, entry, settings)
    file = record_file(model_version, settings)
    # A folder given by `inference.model_path` is somebody's experiment: it is digested, not held to the registry.
    record = None if overridden else digests.read_record(file)
    folder_source = isinstance(parse(entry.source, model_version), Folder)
    if record is not None and record.source != entry.source and not folder_source:
        raise UsageError(
            f"model {model_version}: {folder} was pulled from {record.source}, models.yaml now says {entry.source}; a "
            "version never changes: give the new weights a new version, or delete the folder"
        )
    if record is not None and not full and digests.unchanged(folder, record):
        _hold_to(model_version, entry, record.digest, folder, None)
        return Verified(folder, record.digest)
    files = digests.digest_files(folder)
    found = digests.combine(files)
    if overridden:
        return Verified(folder, found)
    if record is not None and record.digest != found and entry.digest is None:
        remedy = (
            f"a version never changes: give the new weights a new version, or remove {file}"
            if folder_source
            else f"delete the folder and run `workers models pull {model_version}`"
        )
        raise UsageError(
            f"model {model_version}: {folder} is not what was recorded: {digests.difference(files, record.files)}; "
            f"{remedy}"
        )
    _hold_to(model_version, entry, found, folder, digests.difference(files, record.files) if record else None)
    fresh = digests.Record(
        model=model_version,
        source=entry.source,
        digest=found,
        revision=record.revision if record else None,
        pulled_at=record.pulled_at if record else time.time(),
        files=files,
    )
    if fresh != record:
        # A models folder that is mounted read-only works too: it is only read again at the next start.
        with contextlib.suppress(OSError):
            digests.write_record(file, fresh)
    return Verified(folder, found)


def present(model_version: str, entry: ModelVersion, settings: Settings) -> Path:
    """The model's folder when a model is in it; `UsageError` says how to get it."""
    folder = model_folder(model_version, entry, settings)
    if (folder / "config.json").is_file() or (folder / "params.json").is_file():
        return folder
    if settings.inference.model_path or isinstance(parse(entry.source, model_version), Folder):
        where = "inference.model_path" if settings.inference.model_path else f"model {model_version}"
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise UsageError(f"{where}: {folder} {what}; name a model folder (config.json, weights, tokenizer)")
    raise UsageError(
        f"model {model_version} is not on this machine ({folder}); run `workers models pull {model_version}`"
    )


def _hold_to(model_version: str, entry: ModelVersion, found: str, folder: Path, difference: str | None) -> None:
    if entry.digest is not None and entry.digest != found:
        detail = f" ({difference})" if difference and difference != "no file differs" else ""
        raise UsageError(
            f"model {model_version}: {folder} has digest {found}, models.yaml says {entry.digest}{detail}; delete the "
            f"folder and run `workers models pull {model_version}`, or correct the digest"
        )
