"""What the audit is told of a request: filled in as it is learned, written before the caller has its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from starlette.requests import HTTPConnection

from perdure.access.audit import Act
from perdure.access.model import Principal
from perdure.api.services import AuditLog

TRAIL = "perdure.trail"
#: Answers that say: not you, not here, not now.
REFUSED = frozenset({401, 403, 404, 429})
_TARGET_MAX = 300


class Record(Enum):
    """Whether a call has a row, and how sure that row is; ``access.audit`` says why."""

    NEVER = "never"  # it changes nothing
    AFTER = "after"  # it uses a workspace
    AROUND = "around"  # noted before it begins


@dataclass(slots=True)
class Trail:
    """Of one request."""

    audit: AuditLog
    act: Act
    found: str = ""
    record: Record = Record.NEVER
    has_begun: bool = False
    is_over: bool = False

    def who(self, principal: Principal) -> None:
        self.act = replace(self.act, principal=principal.name, tenant_id=principal.tenant_id)

    def about(self, found: str) -> None:
        """The id of what it is about, once that is known."""
        self.found = _clean(found)

    def failed(self, code: str) -> None:
        self.act = replace(self.act, outcome=code)

    def asked(self, route: str, target: str) -> None:
        self.act = replace(self.act, route=route, target=_clean(target))

    async def begin(self, record: Record, *, of_workspace: bool) -> None:
        """Raises what keeps it from being noted: then it must not be done. ``of_workspace``: the target begins with an id or a
        name of one."""
        self.record = record
        if record is Record.AROUND:
            await self.audit.begin(self.act, of_workspace=of_workspace)
            self.has_begun = True

    def handed_over(self) -> None:
        """A program in a workspace answers: what it says is no answer of ours."""
        self.is_over = True

    async def over(self, status: int, *, is_ours: bool = True) -> None:
        """Its answer is about to leave. Not ``is_ours``: a status that a program in a workspace may have chosen."""
        if self.is_over:
            return
        self.is_over = True
        outcome = self.act.outcome or ("ok" if status < 400 else f"http_{status}")
        act = replace(self.act, outcome=outcome, status=status, target=self.found or self.act.target)
        if status in REFUSED and is_ours:
            await self.audit.refused(act, has_begun=self.has_begun)
        elif self.has_begun:
            await self.audit.finish(replace(act, target=self.found))
        elif self.record is Record.AFTER:
            await self.audit.append(act)


def trail_of(connection: HTTPConnection) -> Trail | None:
    """None where no guard stands in front."""
    trail = connection.scope.get(TRAIL)
    return trail if isinstance(trail, Trail) else None


def _clean(text: str) -> str:
    """Whatever a caller wrote, as a database and a terminal take it."""
    return "".join(char if char.isprintable() else "?" for char in text[:_TARGET_MAX])
