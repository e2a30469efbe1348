"""What this machine has."""

from __future__ import annotations

import os


def physical_memory() -> int:
    """Bytes of memory of this machine; 0 where it cannot be told."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
