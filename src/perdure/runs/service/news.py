"""What servers of one database tell each other: that a function has work, that an execution has ended.

It goes with the commit that it is about, one NOTIFY for a batch. Nothing depends on it: whoever waits looks by itself every other
second, so what is said while a connection is away is only heard of later.
"""

from __future__ import annotations

from collections.abc import Iterable

from perdure.core.ids import TenantId, mint
from perdure.db.listening import Listener
from perdure.runs.engine import Decision, Reason
from perdure.runs.service.rows import Kept
from perdure.runs.service.signals import Signals

#: PostgreSQL takes 8,000 bytes.
_MOST_BYTES = 7900
_EVERYTHING = "*"


def work(tenant_id: str, function: str) -> str:
    return f"work {tenant_id} {function}"


def end(execution_id: str) -> str:
    return f"end {execution_id}"


def news_of(before: Kept, decision: Decision) -> tuple[str, ...]:
    """What others wait for: work, a place for work where there are only so many, an end."""
    state = decision.state
    is_over = before.state.invocation is not None and state.invocation is None
    told = []
    if decision.standing.reason is Reason.INVOKE or (is_over and before.is_limited):
        told.append(work(before.tenant_id, state.started.function))
    if state.has_ended and not before.state.has_ended:
        told.append(end(state.id))
    return tuple(told)


class News:
    """``payload`` is what others are sent; ``start`` to hear what they send, ``close`` after."""

    def __init__(self, ready: Signals, ends: Signals, now_ms: int) -> None:
        self._server = mint("srv", now_ms=now_ms)
        self._ready = ready
        self._ends = ends
        self.listener: Listener | None = None

    def start(self, url: str) -> None:
        self.listener = Listener(url, "runs.listen", self.hear)
        self.listener.start()

    async def close(self) -> None:
        if self.listener is not None:
            await self.listener.close()

    def payload(self, news: Iterable[str]) -> str | None:
        """None: nobody has to know."""
        told = sorted(set(news))
        if not told:
            return None
        text = "\n".join([self._server, *told])
        return text if len(text.encode()) <= _MOST_BYTES else f"{self._server}\n{_EVERYTHING}"

    def hear(self, payload: str | None) -> None:
        """None: there may have been something."""
        server, *told = (payload or f"\n{_EVERYTHING}").split("\n")
        if server == self._server:
            return
        for one in told:
            kind, _, rest = one.partition(" ")
            if kind == "work":
                tenant_id, _, function = rest.partition(" ")
                self._ready.tell((TenantId(tenant_id), function))
            elif kind == "end":
                self._ends.tell(rest)
            else:
                self._ready.tell_all()
                self._ends.tell_all()
