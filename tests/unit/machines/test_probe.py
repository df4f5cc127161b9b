"""The accelerator is chosen by what a kernel does, not by what a device says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from perdure.core.errors import HostUnfit
from perdure.machines import probe
from perdure.machines.driver import Accelerator, ChannelName, DiskChain, DiskLayer, Machine, Shape
from perdure.machines.probe import ProbeSpec, choose
from tests.fakes.machine import FakeDriver, FakeMachine


@pytest.fixture(autouse=True)
def kvm_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device that opens, which proves nothing."""
    device = tmp_path / "kvm"
    device.write_bytes(b"")
    monkeypatch.setattr(probe, "KVM_DEVICE", device)
    return device


@pytest.fixture
def spec(tmp_path: Path) -> ProbeSpec:
    for name in ("kernel", "initrd", "agent", "root"):
        (tmp_path / name).write_bytes(b"")
    shape = Shape(tmp_path / "kernel", tmp_path / "initrd", tmp_path / "agent", 1024, 4, 1 << 30)
    disk = DiskChain((DiskLayer(tmp_path / "root", "raw"),))
    return ProbeSpec(shape, disk, tmp_path / "probe", tmp_path / "cache" / "accelerator.json", deadline_s=30)


async def talkative(
    machine: FakeMachine, channel: ChannelName, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(b"hello")
    await writer.drain()
    await reader.read()


async def silent(machine: FakeMachine, channel: ChannelName, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def first_byte(machine: Machine) -> bool:
    """The guest said anything on its control channel."""
    reader, writer = await machine.connect(ChannelName.CONTROL)
    try:
        return bool(await reader.read(1))
    finally:
        writer.transport.abort()


async def test_a_kernel_that_speaks_proves_kvm(spec: ProbeSpec) -> None:
    driver = FakeDriver(talkative)
    verdict = await choose("auto", driver, spec, first_byte)
    assert verdict.accelerator is Accelerator.KVM
    assert [attempt.works for attempt in verdict.attempts] == [True]
    (machine,) = driver.machines
    assert machine.spec.accelerator is Accelerator.KVM
    assert machine.spec.shape.memory_mib == probe.PROBE_MEMORY_MIB
    assert not spec.directory.exists()


async def test_a_kernel_that_hangs_means_emulation(spec: ProbeSpec, tmp_path: Path) -> None:
    hasty = ProbeSpec(spec.shape, spec.disk, spec.directory, spec.cache, deadline_s=0.2)
    verdict = await choose("auto", FakeDriver(silent), hasty, first_byte)
    assert verdict.accelerator is Accelerator.TCG
    assert "said nothing for 0.2 seconds" in verdict.attempts[0].reason
    assert [attempt.works for attempt in verdict.attempts] == [False, True]
    assert not hasty.directory.exists()


async def test_a_verdict_is_remembered_for_the_same_build_and_kernel(spec: ProbeSpec) -> None:
    driver = FakeDriver(talkative)
    first = await choose("auto", driver, spec, first_byte)
    assert await choose("auto", driver, spec, first_byte) == first
    assert len(driver.machines) == 1
    driver.upgrade("fake 2")
    await choose("auto", driver, spec, first_byte)
    assert len(driver.machines) == 2
    spec.shape.kernel.write_bytes(b"another kernel")
    await choose("auto", driver, spec, first_byte)
    assert len(driver.machines) == 3


async def test_verdicts_of_several_vmms_are_remembered_beside_each_other_and_not_for_ever(
    spec: ProbeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "VERDICTS_KEPT", 2)
    driver = FakeDriver(talkative)
    builds = ["fake 1", "fake 2", "fake 3"]
    for build in builds:
        driver.upgrade(build)
        await choose("auto", driver, spec, first_byte)
    for build in reversed(builds):
        driver.upgrade(build)
        await choose("auto", driver, spec, first_byte)
    assert len(driver.machines) == len(builds) + 1, "only the oldest was tried again"


@pytest.mark.parametrize("rubbish", ["", "[]", "{", '{"key": 3}', '{"key": {"works": true}}'])
async def test_a_damaged_cache_is_no_obstacle(spec: ProbeSpec, rubbish: str) -> None:
    spec.cache.parent.mkdir()
    spec.cache.write_text(rubbish)
    assert (await choose("auto", FakeDriver(talkative), spec, first_byte)).accelerator is Accelerator.KVM
    assert len(json.loads(spec.cache.read_text())) == 1


async def test_no_device(spec: ProbeSpec, kvm_device: Path) -> None:
    kvm_device.unlink()
    driver = FakeDriver(talkative)
    verdict = await choose("auto", driver, spec, first_byte)
    assert verdict.accelerator is Accelerator.TCG
    assert "no hardware virtualisation" in verdict.attempts[0].reason
    assert driver.machines == []


async def test_a_vmm_that_does_not_start_under_kvm(spec: ProbeSpec) -> None:
    driver = FakeDriver(talkative)
    driver.fail_next = [HostUnfit("failed to set MSR 0x345")]
    verdict = await choose("auto", driver, spec, first_byte)
    assert verdict.accelerator is Accelerator.TCG
    assert "MSR" in verdict.attempts[0].reason
    assert not spec.directory.exists()


async def test_a_machine_that_breaks(spec: ProbeSpec) -> None:
    async def breaks(machine: Machine) -> bool:
        assert isinstance(machine, FakeMachine)
        machine.break_down()
        return await first_byte(machine)

    verdict = await choose("auto", FakeDriver(silent), spec, breaks)
    assert verdict.accelerator is Accelerator.TCG
    assert "broke" in verdict.attempts[0].reason


async def test_kvm_demanded_and_not_working(spec: ProbeSpec, kvm_device: Path) -> None:
    kvm_device.unlink()
    with pytest.raises(HostUnfit, match="demanded") as caught:
        await choose("kvm", FakeDriver(talkative), spec, first_byte)
    assert "PERDURE_ACCELERATOR=auto" in caught.value.hint


async def test_tcg_when_set_is_not_probed(spec: ProbeSpec) -> None:
    driver = FakeDriver(talkative)
    assert (await choose("tcg", driver, spec, first_byte)).accelerator is Accelerator.TCG
    assert driver.machines == []


def test_a_device_that_may_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "device"
    device.write_bytes(b"")

    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(probe.os, "open", refused)
    assert "usermod" in probe.kvm_obstacle(device)
