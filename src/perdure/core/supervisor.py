"""Words to whoever supervises this process: systemd's notification protocol (sd_notify(3)), one datagram each.

Nothing is said where nobody listens, and a supervisor that does not hear us is no reason to fail.
"""

from __future__ import annotations

import contextlib
import socket

READY = "READY=1"
STOPPING = "STOPPING=1"


def more_time(seconds: float) -> str:
    """Do not kill us before so many seconds from now, whatever the unit says."""
    return f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}"


def status(sentence: str) -> str:
    """What ``systemctl status`` shows."""
    return f"STATUS={sentence}"


def notify(address: str | None, *words: str) -> None:
    """``address`` is the value of NOTIFY_SOCKET: a path, or a name in the abstract namespace that begins with ``@``."""
    if not address:
        return
    where = f"\0{address[1:]}" if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        sock.sendto("\n".join(words).encode(), where)
