"""What must be equal for a device state to be loaded: a machine's fingerprint, in parts so that a mismatch can be explained.

The disk's size is no part: it is the host device's, and a guest learns of another one. Nor is the agent disk: a snapshot names
its image by digest and always gets that image's own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from perdure.machines.driver import Accelerator, Shape, VmmIdentity
from perdure.machines.qemu_args import Descriptors, Invocation, Start, arguments

#: How much translated code QEMU keeps is not seen by a guest; what fingerprints were first taken with stands in its place.
_TRANSLATION_CACHE = re.compile(r"tb-size=\d+")
_AS_FINGERPRINTED = "tb-size=128"


@dataclass(frozen=True, slots=True)
class GuestFacts:
    """What of the guest's side counts."""

    kernel_digest: str
    agent_protocol: int


def fingerprint_parts(identity: VmmIdentity, accelerator: Accelerator, shape: Shape, guest: GuestFacts) -> dict[str, str]:
    """The parts by name, as a snapshot's manifest keeps them."""
    return {
        "vmm": identity.build,
        "machine": identity.machine,
        "cpu_model": identity.cpu_model,
        "accelerator": accelerator.value,
        "tsc_khz": str(identity.tsc_khz or "any"),
        "memory_mib": str(shape.memory_mib),
        "vcpus": str(shape.vcpus),
        "arguments": _arguments_digest(identity, accelerator, shape),
        "kernel": guest.kernel_digest[:16],
        "agent_protocol": str(guest.agent_protocol),
    }


def fingerprint(parts: Mapping[str, str]) -> str:
    """32 hex digits over all parts."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()[:32]


def _arguments_digest(identity: VmmIdentity, accelerator: Accelerator, shape: Shape) -> str:
    """The command line without what differs from one start to the next."""
    call = Invocation(
        guest_name="",
        version=identity.version,
        machine=identity.machine,
        cpu_model=identity.cpu_model,
        accelerator=accelerator,
        shape=replace(shape, disk_bytes=0),
        shared_ram=False,
        start=Start.RESTORE,
        fds=Descriptors(**{name: number for number, name in enumerate(Descriptors.__slots__)}),
    )
    words = [_TRANSLATION_CACHE.sub(_AS_FINGERPRINTED, word) for word in arguments(call)]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
