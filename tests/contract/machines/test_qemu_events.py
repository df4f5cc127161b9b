"""What QEMU tells of a machine, and what is made of it."""

from __future__ import annotations

from typing import Any

from perdure.machines.driver import MachineState
from perdure.machines.qemu import QemuMachine
from tests.contract.machines.world import ask


async def test_a_disk_error_that_is_told_late_is_none_of_what_runs_now(qemu_machine: QemuMachine) -> None:
    """QEMU 10 lets out one such event a second, and tells the next when that is over."""

    def error(after_s: int) -> dict[str, Any]:
        stamp = {"seconds": qemu_machine._resumed_at[0] + after_s, "microseconds": 0}
        return {"event": "BLOCK_IO_ERROR", "data": {"action": "stop", "nospace": True}, "timestamp": stamp}

    await qemu_machine.pause()
    await qemu_machine.resume()
    assert await ask(qemu_machine, "echo runs") == "runs"
    qemu_machine.on_qmp_event(error(-5))
    assert qemu_machine.state is MachineState.RUNNING
    qemu_machine.on_qmp_event(error(+5))
    assert qemu_machine.state is MachineState.NO_SPACE
