"""What most commands start from: settings, the model registry, the store."""

from __future__ import annotations

from common import places, registry, settings
from common.errors import Unreachable, UsageError
from common.registry import Registry
from common.settings import Settings
from common.store import LocalStore, Store, open_store


def load_settings() -> Settings:
    """The settings of this machine; `UsageError` names file and key."""
    return settings.load()


def load_registry(loaded: Settings) -> Registry:
    """The model registry, with the settings' default model checked against it."""
    found = registry.load()
    if loaded.inference.default_model is not None:
        found.resolve(loaded.inference.default_model)
    return found


def store_of(loaded: Settings) -> Store:
    """The store; `Unreachable` when it does not answer."""
    return open_store(places.store_url(loaded))


def existing_store(loaded: Settings) -> Store:
    """The store, for commands that only look or ask: none is made.

    `Unreachable` when the one that the settings name is not there; where they name none, nothing was submitted yet.
    """
    store = open_store(places.store_url(loaded), make=False)
    if loaded.store.url is not None and isinstance(store, LocalStore) and not store.exists(""):
        raise Unreachable(f"there is no store at {store.url}; look at store.url (BATCHMILL_STORE_URL)")
    return store


def pairs(given: list[str]) -> dict[str, str]:
    """`k=v` arguments as a mapping; `UsageError` for anything else."""
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--metadata {text}: write it as key=value")
        if key in found:
            raise UsageError(f"--metadata {key}: given twice")
        found[key] = value
    return found


def installed_version() -> str:
    """The version of the installed distribution."""
    from importlib import metadata

    try:
        return metadata.version("batchmill")
    except metadata.PackageNotFoundError:
        return "(run from a source tree that is not installed)"
