"""Bytes as URL-safe base64 without padding. Each has one writing, and no other is read. Pure."""

from __future__ import annotations

import base64


def encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def decode(text: str) -> bytes:
    """Raises ValueError for what ``encode`` writes for no bytes: other letters, padding, odd lengths, stray bits."""
    raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if encode(raw) != text:
        raise ValueError("not the base64 of any bytes")
    return raw
