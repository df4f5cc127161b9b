"""How the feed of events is read, without doing any I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from perdure.core.errors import PerdureError
from perdure.sdk._core import RECONNECTS, Call, delay_s, query_of
from perdure.sdk.errors import ConnectionLost, rebuild
from perdure.wire import public


class FeedReader:
    """Reads the feed across broken connections: from which number on, what a line means, when to give up."""

    def __init__(self, query: Mapping[str, object], kinds: Sequence[str]) -> None:
        self._query = dict(query)
        self._kinds = tuple(("kind", kind) for kind in kinds)
        self._seq: int | None = None
        self._kind = ""
        self._breaks = 0
        self.is_open = False

    def next_call(self) -> Call:
        query = self._query if self._seq is None else {**self._query, "after": self._seq, "last": None}
        return Call("GET", "/v1/events", (*query_of(query), *self._kinds), repeatable=True)

    def feed(self, line: bytes) -> public.FeedEvent | None:
        """One line of the stream; raises the error that ended it."""
        self._breaks, self.is_open = 0, True
        name, _, value = line.rstrip(b"\r").partition(b": ")
        if name == b"id":
            self._kind, self._seq = "", int(value)
        elif name == b"event":
            self._kind = value.decode()
        elif name == b"data" and self._kind == "error":
            raise rebuild(json.loads(value), 500)
        elif name == b"data":
            return public.FeedEvent.model_validate_json(value)
        return None

    def broke(self, error: PerdureError) -> float:
        """Seconds to wait before the feed is read on; raises ``error`` when that is pointless."""
        again = isinstance(error, ConnectionLost) or (
            self.is_open and error.code in {"unavailable", "server_unreachable", "busy"}
        )
        self._breaks += 1
        if not again or self._breaks > RECONNECTS:
            raise error
        return delay_s(self._breaks)
