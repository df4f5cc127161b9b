"""What a keeper knows of one request: its client, and the cell that runs for it."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

#: What one cell may say: characters of text, bytes of all else, characters of a traceback. A line of JSON holds one piece.
TEXT_MAX, RICH_MAX, TRACEBACK_MAX = 8 << 20, 32 << 20, 64 << 10
PIECE, NAME_MAX = 1 << 20, 200
_ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def line_of(event: Any) -> bytes:
    """What is half of a character in some text becomes a question mark."""
    return json.dumps(event, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


class Client:
    """A connection: one request, and what is to be said to it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.received = bytearray()
        self.to_send = bytearray()
        self.is_over = False  # nothing more will be said

    def say(self, event: dict[str, Any]) -> None:
        self.to_send += line_of(event)

    def finish(self, event: dict[str, Any]) -> None:
        """The last word."""
        self.say(event)
        self.to_send += b"\n"
        self.is_over = True

    def flush(self) -> None:
        """Raises OSError when it has gone."""
        try:
            while self.to_send:
                del self.to_send[: self.socket.send(self.to_send)]
        except BlockingIOError:
            pass


class Run:
    """One cell: from its client's request to its end."""

    def __init__(self, client: Client, request: dict[str, Any]) -> None:
        self.client = client
        self.code = str(request["code"])
        limit = request.get("timeout_s")
        self.limit_s = None if limit is None else float(limit)
        self.message_id = ""
        self.due: float | None = None  # of its next interrupt
        self.interrupts = 0
        self.stuck_at: float | None = None
        self.done_by: float | None = None  # it has replied, and its last output is awaited for so long
        self.status = "ok"
        self.is_idle = self.is_truncated = False
        self.reply: dict[str, Any] | None = None
        self._text_left, self._rich_left = TEXT_MAX, RICH_MAX

    def on_output(self, kind: str, content: dict[str, Any]) -> None:
        """A message of the kernel about it."""
        if kind == "stream":
            self._on_text(str(content.get("name")), str(content.get("text")))
        elif kind in ("display_data", "update_display_data", "execute_result"):
            self._on_rich(kind, content)
        elif kind == "error":
            self.due = None  # whatever interrupted it did
            traceback = _ANSI.sub("", "\n".join(map(str, content.get("traceback") or ())))
            self.is_truncated |= len(traceback) > TRACEBACK_MAX
            told = {"name": str(content.get("ename"))[:NAME_MAX], "value": str(content.get("evalue"))[:TRACEBACK_MAX]}
            self.client.say({"type": "error", **told, "traceback": traceback[-TRACEBACK_MAX:]})
        elif kind == "status" and content.get("execution_state") == "idle":
            self.is_idle = True

    def _on_text(self, name: str, text: str) -> None:
        kept = text[: self._text_left]
        self._text_left -= len(kept)
        self.is_truncated |= len(kept) < len(text)
        stream = "stderr" if name == "stderr" else "stdout"
        for start in range(0, len(kept), PIECE):
            self.client.say({"type": "stream", "stream": stream, "text": kept[start : start + PIECE]})

    def _on_rich(self, kind: str, content: dict[str, Any]) -> None:
        data, omitted = {}, []
        for mime, value in (content.get("data") or {}).items():
            size = len(line_of(value))
            if size > self._rich_left:
                omitted.append(mime)
            else:
                self._rich_left -= size
                data[mime] = value
        event: dict[str, Any] = {"type": kind, "data": data}
        if omitted:
            event["omitted"], self.is_truncated = omitted, True
        name = (content.get("transient") or {}).get("display_id")
        if name is not None:
            event["display_id"] = str(name)
        self.client.say(event)

    def finish(self) -> None:
        reply = self.reply or {}
        status = "ok" if reply.get("status") == "ok" else "error" if self.status == "ok" else self.status
        count = reply.get("execution_count")
        self.client.finish({"type": "done", "status": status, "execution_count": count, "truncated": self.is_truncated})
