"""How long the embedded fleet stays with nothing to do."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from common.errors import UsageError

#: Seconds without anything to do after which the fleet ends; negative: never.
DEFAULT_LINGER_S = 300.0
LINGER_ENV = "BATCHMILL_FLEET_LINGER_S"


def linger(env: Mapping[str, str] = os.environ) -> float:
    """The linger time out of the environment; `UsageError` when it is no number."""
    text = env.get(LINGER_ENV, "")
    try:
        found = float(text) if text else DEFAULT_LINGER_S
    except ValueError:
        found = math.nan
    if math.isnan(found):
        raise UsageError(f"{LINGER_ENV}: '{text}' is not a number of seconds")
    return found
