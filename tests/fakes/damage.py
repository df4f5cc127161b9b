"""Damage that a test does: a byte that is certainly another one afterwards."""

from __future__ import annotations


def last_byte_flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])
