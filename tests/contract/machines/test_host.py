"""What is said of a host without a machine: which QEMU the suite has run on, and how machines are confined there."""

from __future__ import annotations

import pytest

from perdure.machines.driver import Accelerator, Machine
from perdure.machines.qemu import QemuConfig
from perdure.machines.qemu_host import examine
from tests.contract.machines.conftest import QEMU10_PLACES, qemu_binaries
from tests.contract.machines.world import World

pytestmark = pytest.mark.qemu


async def test_the_suite_has_run_on_a_qemu_10() -> None:
    """The system's own may be one; else it is fetched beside it, where the distribution has it."""
    found = {name: await examine(QemuConfig(qemu=binary)) for name, binary in qemu_binaries().items()}
    if all(binary.version < (10, 0, 0) for binary in found.values()):
        shown = ".".join(map(str, found["qemu"].version))
        pytest.skip(
            f"the machine suite ran on QEMU {shown} only: there is no QEMU 10 at {' or '.join(map(str, QEMU10_PLACES))}; "
            "'tools/setup.sh qemu10' fetches it from Debian's backports, or says why it cannot"
        )
    assert len({binary.build for binary in found.values()}) == len(found), "two names of one QEMU prove nothing more"


async def test_what_is_foreseen_is_what_a_machine_gets(qemu_world: World, qemu_machine: Machine) -> None:
    """Every protection, and the reason for each that does not hold."""
    assert await qemu_world.make_driver().foresee(Accelerator.TCG) == qemu_machine.confinement  # type: ignore[attr-defined]
