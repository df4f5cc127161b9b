"""The guest protocol: what the node and the agent inside a workspace say to each other. Standard library only; no I/O here.

Two virtio-serial ports carry it, ``perdure.control`` and ``perdure.data`` (machines.driver.ChannelName), with the same frames:

* ``frames``: bytes to frames and back, and how a connection finds its feet again (DESIGN D3);
* ``mux``: calls, and flow-controlled streams, over one channel;
* ``ops``: names of the operations and of the errors, limits, and the protocol's version.

The host is always the one that begins a connection; the guest side of a port sees neither its beginning nor its end.
"""

from __future__ import annotations

from perdure.wire.guest.frames import NONCE_BYTES, Decoder, FrameType, encode, encode_sync
from perdure.wire.guest.mux import Event, EventKind, Mux, Role, WireMisuse
from perdure.wire.guest.ops import AGENT_VERSION, PROTOCOL

__all__ = [
    "AGENT_VERSION",
    "NONCE_BYTES",
    "PROTOCOL",
    "Decoder",
    "Event",
    "EventKind",
    "FrameType",
    "Mux",
    "Role",
    "WireMisuse",
    "encode",
    "encode_sync",
]
