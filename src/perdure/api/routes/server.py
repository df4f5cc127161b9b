"""Is it up, and what can this host do."""

from __future__ import annotations

import os

from fastapi import APIRouter

import perdure
from perdure.api.deps import Call
from perdure.wire import public

router = APIRouter(tags=["server"])


@router.get("/health")
async def health(call: Call) -> public.Health:
    """Answers as soon as the server serves."""
    return public.Health(version=perdure.__version__, pid=os.getpid())


@router.get("/doctor")
async def doctor(call: Call) -> public.DoctorReport:
    """What of QEMU, KVM, jail, cgroups and storage holds on this host, and what mends the rest."""
    return await call.services.doctor()
