"""The host that a benchmark's numbers belong to."""

from __future__ import annotations

import os
import platform

from perdure.machines import softdirty


def host() -> dict[str, str | int | float]:
    """What the numbers belong to. ``load_1min`` tells how quiet the host was."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpus": os.cpu_count() or 1,
        "memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
        "soft_dirty": int(softdirty.works()),
    }
