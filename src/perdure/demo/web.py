"""The smallest HTTP client that can say when the first byte came. For the demo's own server behind a forwarded port."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus

from perdure.demo.steps import expect

DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    first_byte_s: float  # since the request began, connecting included

    def json(self) -> Any:
        return json.loads(self.body)


async def ask(port: int, method: str, resource: str, **query: str) -> Reply:
    """One request to 127.0.0.1:``port``; raises DemoFailed when the answer is not 200, TimeoutError when there is none."""
    target = resource + ("?" + "&".join(f"{key}={quote_plus(value)}" for key, value in query.items()) if query else "")
    started = time.perf_counter()
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(f"{method} {target} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode())
            first = await reader.read(1)
            first_byte_s = time.perf_counter() - started
            text = first + await reader.read()
        finally:
            writer.close()
    head, _, body = text.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0
    expect(status == 200, f"{method} {target} through the host answered {status or 'nothing'}.")
    return Reply(status, body, first_byte_s)
