"""Perdure: persistent machines for AI agents that stop the compute without losing the agent.

``from perdure import Workspace, AsyncWorkspace`` loads the SDK on first use only: the guest agent imports ``perdure.wire.guest``
with nothing but the standard library around.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.core.errors import PerdureError
    from perdure.sdk import AsyncClient, AsyncWorkspace, Client, Workspace

__version__ = "0.1.0"
__all__ = ["AsyncClient", "AsyncWorkspace", "Client", "PerdureError", "Workspace", "__version__"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import perdure.sdk

        return getattr(perdure.sdk, name)
    raise AttributeError(f"module 'perdure' has no attribute {name!r}")
