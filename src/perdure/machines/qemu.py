"""The QEMU driver: finds the binary, judges the host, starts processes and hands out machines.

A start makes, in this order: the run directory with its marker, sockets and open files, the cgroup, the process (blocked
inside its jail until it is in its cgroup), the QMP session, the view of guest memory. Whatever fails undoes the rest.
"""

from __future__ import annotations

import asyncio
import os
import shutil

from perdure.core.errors import InvalidRequest, MachineDied
from perdure.machines import cgroups, jail, process, qemu_leftovers
from perdure.machines.driver import Accelerator, DiskChain, LaunchSpec, MachineState, VmmIdentity
from perdure.machines.jail import Jail
from perdure.machines.qemu_args import Descriptors, Invocation, Start, arguments, readonly_base
from perdure.machines.qemu_host import (
    Binary,
    QemuConfig,
    check_spec,
    choose_jail,
    confinement,
    cpu_model,
    examine,
    foresee,
    tsc_khz,
)
from perdure.machines.qemu_machine import Parts, QemuMachine
from perdure.machines.qemu_start import Starting, open_handles
from perdure.wire.node import Confinement

__all__ = ["QemuConfig", "QemuDriver", "QemuMachine"]


class QemuDriver:
    """Implements ``MachineDriver``. Its facts about the host are looked up once, those of the binary again when it changes."""

    def __init__(self, config: QemuConfig | None = None) -> None:
        self._config = config or QemuConfig()
        self._lock = asyncio.Lock()
        self._binary: Binary | None = None
        self._verdict: jail.Verdict | None = None
        self._hierarchies: cgroups.Hierarchies | None = None

    async def identity(self, accelerator: Accelerator) -> VmmIdentity:
        binary = await self._examine()
        return VmmIdentity(
            name="qemu",
            version=binary.version,
            build=binary.build,
            machine=binary.machine,
            cpu_model=cpu_model(accelerator),
            tsc_khz=tsc_khz() if accelerator is Accelerator.TCG else None,
        )

    async def jail_verdict(self) -> jail.Verdict:
        """Which jails work here, for ``doctor``. Raises HostUnfit when a required one does not."""
        binary = await self._examine()
        async with self._lock:
            if self._verdict is None:
                self._verdict = await jail.judge(self._config.jail, binary.path, binary.system)
            return self._verdict

    async def foresee(self, accelerator: Accelerator) -> Confinement:
        """Which protections will hold for the machines of workspaces, found out by trying. Raises HostUnfit."""
        binary, verdict = await self._examine(), await self.jail_verdict()
        missing = await asyncio.to_thread(cgroups.limits_missing, f"foresee-{os.getpid()}")
        return foresee(accelerator, verdict, missing, binary.version)

    async def boot(self, spec: LaunchSpec, disk: DiskChain) -> QemuMachine:
        machine = await self._launch(spec, Start.BOOT)
        try:
            await machine.start_cold(disk)
        except BaseException:
            await machine.kill()
            raise
        return machine

    async def prepare(self, spec: LaunchSpec) -> QemuMachine:
        if spec.ram.shared:
            raise InvalidRequest("A prepared machine maps its memory privately; shared memory is for making a golden snapshot.")
        machine = await self._launch(spec, Start.RESTORE)
        try:
            await machine.open_below(spec.disk_below)
        except BaseException:
            await machine.kill()
            raise
        return machine

    # -------------------------------------------------------------------------------------------------------------- start

    async def _launch(self, spec: LaunchSpec, start: Start) -> QemuMachine:
        process.assert_main_thread()
        binary = await self._examine()
        verdict = await self.jail_verdict()
        check_spec(spec)
        qemu_leftovers.claim(spec)
        group = cgroups.Group()
        try:
            if self._hierarchies is None:
                self._hierarchies = cgroups.discover()
            group = cgroups.create(self._hierarchies, qemu_leftovers.group_name(spec), spec.limits)
            return await self._spawn(spec, start, binary, verdict, group)
        except BaseException:
            group.remove()
            shutil.rmtree(spec.run_dir, ignore_errors=True)
            qemu_leftovers.forget(spec)
            raise

    async def _spawn(
        self, spec: LaunchSpec, start: Start, binary: Binary, verdict: jail.Verdict, group: cgroups.Group
    ) -> QemuMachine:
        choice = choose_jail(spec, binary.version, verdict)
        wrapping = Jail(
            choice.kind,
            binary.system,
            override_modes=not spec.ram.shared and not readonly_base(binary.version),
            kvm=spec.accelerator is Accelerator.KVM,
        )
        with open_handles(spec) as handles:
            starting = Starting(spec, group, wrapping)
            argv = [str(binary.path), *arguments(self._invocation(spec, start, binary, handles.inherited))]
            starting.spawn(argv, handles)
        try:
            vmm = await starting.talk(restores=start is Start.RESTORE)
            parts = Parts(
                starting.child,
                vmm,
                starting.qmp,
                starting.serial,
                group,
                confinement(spec, choice, group, binary.version, vmm.pid),
            )
            machine = QemuMachine(spec, parts, MachineState.PREPARED if start is Start.RESTORE else MachineState.PAUSED)
        except (MachineDied, TimeoutError, OSError) as error:
            raise await starting.failed(error) from error
        except BaseException:
            await starting.end()
            raise
        starting.hand_over(machine)
        return machine

    def _invocation(self, spec: LaunchSpec, start: Start, binary: Binary, fds: Descriptors) -> Invocation:
        return Invocation(
            guest_name=qemu_leftovers.guest_name(spec),
            version=binary.version,
            machine=binary.machine,
            cpu_model=cpu_model(spec.accelerator),
            accelerator=spec.accelerator,
            shape=spec.shape,
            shared_ram=spec.ram.shared,
            start=start,
            fds=fds,
            data_dir=str(self._config.data_dir) if self._config.data_dir else None,
        )

    # --------------------------------------------------------------------------------------------------------------- host

    async def _examine(self) -> Binary:
        async with self._lock:
            if self._binary is None or not self._binary.is_current():
                self._binary, self._verdict = await examine(self._config), None
            return self._binary
