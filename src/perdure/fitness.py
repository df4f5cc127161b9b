"""``perdure doctor`` without a server. Beside ``wiring``, which brings all of a server along: loading that takes several times as
long as every check together."""

from __future__ import annotations

from perdure.core.config import Settings
from perdure.images.registry import ImageStore
from perdure.machines.qemu import QemuConfig, QemuDriver
from perdure.node.doctor import examine
from perdure.wire import public


async def doctor(settings: Settings) -> public.DoctorReport:
    """What this host can do, and what mends the rest."""
    return await examine(settings, driver(settings), ImageStore(settings.images))


def driver(settings: Settings) -> QemuDriver:
    """The QEMU of these settings."""
    return QemuDriver(QemuConfig(qemu=settings.qemu, data_dir=settings.qemu_data, jail=settings.jail))
