"""A host that lacks nothing but KVM."""

from __future__ import annotations

from perdure.wire import public
from perdure.wire.node import Isolation


async def doctor() -> public.DoctorReport:
    checks = [
        public.DoctorCheck(name="qemu", status=public.CheckStatus.OK, detail="7.2.22"),
        public.DoctorCheck(name="kvm", status=public.CheckStatus.WARN, detail="the kernel hangs under it", hint="Nothing to do."),
    ]
    return public.DoctorReport(ok=True, isolation=Isolation.VM_EMULATED, checks=checks)
