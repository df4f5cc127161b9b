"""Who an entry of a history is by: a role, and behind it whose key the call came with."""

from __future__ import annotations

from contextvars import ContextVar

#: The principal of the current request.
_principal: ContextVar[str] = ContextVar("perdure_principal", default="")


def asked_by(principal: str) -> None:
    """From here on what this request decides is decided by them."""
    _principal.set(principal)


def actor(role: str) -> str:
    """``ROLE PRINCIPAL``; the role alone where nobody asked, or this process did itself."""
    principal = _principal.get()
    return f"{role} {principal}" if principal else role
