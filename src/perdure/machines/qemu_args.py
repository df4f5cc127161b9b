"""QEMU's command line, made of small pure functions: one per device, joined by ``arguments``.

Everything that is a file or a socket arrives as an inherited descriptor, so the command line names no path of the host
and the same line serves a pooled machine that belongs to no workspace yet. The device tree depends on the ``Shape``, the
accelerator and the QEMU build alone: only equal ones can exchange device states.

Disks are explicit ``-blockdev`` graphs and no format is ever probed. The root disk is born as a placeholder of the right
size (``ph`` below the raw node ``d0``) and gets its real layers over QMP, in a cold boot as in a pooled one, so that there is
one code path. ``locking=off``: a layer is written by one machine only, which the store guarantees, and immutable layers are
shared between machines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from perdure.machines.driver import Accelerator, ChannelName, Shape

#: Translated code QEMU may keep per machine under TCG, in MiB; without a bound it is a quarter of guest RAM and up to 1 GiB. All
#: of it is filled soon, mostly with what is never run again. Processor time of twenty ``git status``, 128 being 1: 64 about 1.1,
#: 48 between 1.1 and 1.4, 40 and 32 from 1.3 to 2.2. It is no part of the machine's state and of no fingerprint.
TRANSLATION_CACHE_MIB = 48
#: Threads for file I/O; the default of 64 would run into the pids limit, where QEMU aborts.
IO_THREADS_MAX = 16

ROOT_DEVICE = "root"
ROOT_NODE = "d0"
ROOT_SERIAL = "perdure-root"
AGENT_SERIAL = "perdure-agent"

#: What the guest kernel is always told. ``nokaslr`` and ``init_on_free`` keep the difference to the base small, and
#: ``no_timer_check`` keeps an emulated timer from failing calibration on a busy host. A panic reboots, which ends the VMM.
KERNEL_COMMAND_LINE = ("console=ttyS0", "quiet", "nokaslr", "init_on_free=1", "no_timer_check", "panic=-1")
#: Retpolines and the like break an emulator's chains of translated code: page faults cost five times as much, copies four
#: times. They guard a guest's kernel against its own users, who are one trust boundary here, and for real CPUs only.
EMULATED_COMMAND_LINE = ("mitigations=off",)


class Start(StrEnum):
    """How the process is started: paused for a cold boot, or waiting for a device state."""

    BOOT = "boot"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Numbers of the descriptors the process inherits."""

    qmp: int
    serial: int
    control: int
    data: int
    ram: int
    kernel: int
    initrd: int
    agent_disk: int


@dataclass(frozen=True, slots=True)
class Invocation:
    """All that the command line depends on."""

    guest_name: str  # shown in process lists; how leftovers are found
    version: tuple[int, int, int]
    machine: str
    cpu_model: str
    accelerator: Accelerator
    shape: Shape
    shared_ram: bool
    start: Start
    fds: Descriptors
    data_dir: str | None = None


def readonly_base(version: tuple[int, int, int]) -> bool:
    """Whether this QEMU can map RAM privately from a file opened read-only (``rom=off``, QEMU 8.2)."""
    return version >= (8, 2, 0)


def arguments(call: Invocation) -> list[str]:
    """Everything after the binary's name."""
    return [
        *_process(call),
        *_machine(call),
        *_accelerator(call),
        *_memory(call),
        *_kernel(call),
        *_root_disk(call.shape),
        *_agent_disk(call.fds),
        *_channels(call.fds),
        *_serial(call.fds),
        *_identity_devices(),
        *_monitor(call.fds),
        *_start(call),
    ]


def _process(call: Invocation) -> list[str]:
    return [
        "-name",
        f"guest={call.guest_name},debug-threads=on",
        *(["-L", call.data_dir] if call.data_dir else []),
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-monitor",
        "none",
        "-parallel",
        "none",
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-object",
        f"main-loop,id=main-loop,thread-pool-min=2,thread-pool-max={IO_THREADS_MAX}",
    ]


def _machine(call: Invocation) -> list[str]:
    off = "usb=off,sata=off,smbus=off,vmport=off,graphics=off,smm=off,mem-merge=off,dump-guest-core=off"
    return [
        "-machine",
        f"{call.machine},memory-backend=mem,{off},suppress-vmdesc=on",
        "-smp",
        f"cpus={call.shape.vcpus},sockets=1,cores={call.shape.vcpus},threads=1",
        "-action",
        "reboot=shutdown,panic=shutdown,shutdown=poweroff",
        # Device states carry no configuration section, so none may be expected.
        "-global",
        "migration.send-configuration=off",
        # SeaBIOS would wait for a key and look for other boot devices.
        "-boot",
        "menu=off,strict=on,reboot-timeout=0",
    ]


def _accelerator(call: Invocation) -> list[str]:
    if call.accelerator is Accelerator.KVM:
        return ["-accel", "kvm", "-cpu", call.cpu_model]
    return ["-accel", f"tcg,thread=multi,tb-size={TRANSLATION_CACHE_MIB}", "-cpu", call.cpu_model]


def _memory(call: Invocation) -> list[str]:
    backend = (
        f"memory-backend-file,id=mem,mem-path=/proc/self/fd/{call.fds.ram},size={call.shape.memory_mib}M,"
        f"share={'on' if call.shared_ram else 'off'},merge=off,dump=off,prealloc=off"
    )
    if not call.shared_ram and readonly_base(call.version):
        backend += ",readonly=on,rom=off"
    return ["-m", f"{call.shape.memory_mib}M", "-object", backend]


def _kernel(call: Invocation) -> list[str]:
    emulated = EMULATED_COMMAND_LINE if call.accelerator is Accelerator.TCG else ()
    return [
        "-kernel",
        f"/proc/self/fd/{call.fds.kernel}",
        "-initrd",
        f"/proc/self/fd/{call.fds.initrd}",
        "-append",
        " ".join((*KERNEL_COMMAND_LINE, *emulated, *call.shape.cmdline_extra)),
    ]


def _root_disk(shape: Shape) -> list[str]:
    return [
        *_blockdev({"driver": "null-co", "node-name": "ph", "size": shape.disk_bytes, "read-zeroes": True}),
        *_blockdev({"driver": "raw", "node-name": ROOT_NODE, "file": "ph", "discard": "unmap"}),
        "-device",
        f"virtio-blk-pci,id={ROOT_DEVICE},drive={ROOT_NODE},serial={ROOT_SERIAL},bus=pcie.0,addr=0x3,disable-legacy=on,"
        # An I/O error stops the machine instead of reaching the guest's file system: a full host disk loses nothing.
        "num-queues=1,rerror=stop,werror=stop",
    ]


def _agent_disk(fds: Descriptors) -> list[str]:
    file = {
        "driver": "file",
        "node-name": "agent-file",
        "filename": f"/dev/fdset/{fds.agent_disk}",
        "read-only": True,
        "locking": "off",
    }
    return [
        "-add-fd",
        f"fd={fds.agent_disk},set={fds.agent_disk}",
        *_blockdev(file),
        *_blockdev({"driver": "raw", "node-name": "agent", "file": "agent-file", "read-only": True}),
        "-device",
        f"virtio-blk-pci,id=agentdisk,drive=agent,serial={AGENT_SERIAL},bus=pcie.0,addr=0x4,disable-legacy=on,num-queues=1",
    ]


def _channels(fds: Descriptors) -> list[str]:
    devices = ["-device", "virtio-serial-pci,id=ports,bus=pcie.0,addr=0x5,disable-legacy=on,max_ports=4"]
    for number, (name, listener) in enumerate(((ChannelName.CONTROL, fds.control), (ChannelName.DATA, fds.data)), start=1):
        devices += [
            "-chardev",
            f"socket,id=port{number},fd={listener},server=on,wait=off",
            "-device",
            f"virtserialport,bus=ports.0,nr={number},chardev=port{number},name={name.value}",
        ]
    return devices


def _serial(fds: Descriptors) -> list[str]:
    """The console: its tail explains a boot that failed."""
    return ["-chardev", f"socket,id=console,fd={fds.serial}", "-serial", "chardev:console"]


def _identity_devices() -> list[str]:
    """Random numbers, a fresh generation id at every start (a fork's kernel reseeds), and word of a panic."""
    return [
        "-object",
        "rng-builtin,id=rng",
        "-device",
        "virtio-rng-pci,rng=rng,bus=pcie.0,addr=0x6,disable-legacy=on",
        "-device",
        "vmgenid,guid=auto",
        "-device",
        "pvpanic",
    ]


def _monitor(fds: Descriptors) -> list[str]:
    return ["-chardev", f"socket,id=qmp,fd={fds.qmp}", "-mon", "chardev=qmp,mode=control,pretty=off"]


def _start(call: Invocation) -> list[str]:
    return ["-S"] if call.start is Start.BOOT else ["-S", "-incoming", "defer"]


def _blockdev(node: dict[str, Any]) -> list[str]:
    return ["-blockdev", json.dumps(node, separators=(",", ":"))]
