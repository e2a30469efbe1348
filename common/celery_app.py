"""The Celery application by its name, for Celery's own tools: `celery -A common.celery_app inspect ping`, Flower.

It speaks to the configured broker, else to the embedded fleet of this user.
"""

from __future__ import annotations

from common import places, settings
from common.broker import make_app
from common.errors import UsageError
from common.settings import Settings


def _settings() -> Settings:
    loaded = settings.load()
    if loaded.broker.url:
        return loaded
    # Written by the embedded fleet at its start, with its broker filled in.
    embedded = places.fleet_dir() / "settings.yaml"
    if not embedded.exists():
        raise UsageError(
            "no broker is configured (broker.url, BATCHMILL_BROKER_URL) and no embedded fleet was ever started here"
        )
    return settings.load(embedded, {})


app = make_app(_settings())
