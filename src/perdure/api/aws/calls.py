"""One request of AWS's: the parts of its path and query, judged as botocore's models say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from starlette.requests import Request

from perdure.api.deps import Bundle
from perdure.core.errors import InvalidRequest, NotFound
from perdure.core.ids import TenantId
from perdure.runs.protocol import Wire, parse, parse_arn, parse_function
from perdure.runs.service.model import Executions

ITEMS = 100
ITEMS_MAX = 1000
#: There is one version of each function: what its last worker has.
QUALIFIERS = frozenset({None, "$LATEST", "$LATEST.PUBLISHED"})
W = TypeVar("W", bound=Wire)


@dataclass(frozen=True, slots=True)
class AwsCall:
    """``path``: its parts, decoded."""

    request: Request
    bundle: Bundle
    path: Mapping[str, str]
    query: Mapping[str, list[str]]

    @property
    def executions(self) -> Executions:
        return self.bundle.services.executions

    @property
    def tenant_id(self) -> TenantId:
        return self.bundle.ctx.tenant_id

    @property
    def execution_id(self) -> str:
        """Raises InvalidRequest for what is not the ARN of an execution."""
        return parse_arn(self.path["arn"]).id

    def function(self) -> str:
        """The function's name. Raises InvalidRequest, and NotFound for a version that there is not."""
        found = parse_function(self.path["function"])
        asked = self.text("Qualifier")
        if found.qualifier is not None and asked is not None and asked != found.qualifier:
            raise InvalidRequest("The function's ARN and the parameter Qualifier name two versions.", hint="Give one of them.")
        qualifier = found.qualifier or asked
        if qualifier not in QUALIFIERS:
            message = f"Function {found.name!r} has no version or alias {qualifier!r}."
            raise NotFound(message, hint="There is only $LATEST: what its last worker has.")
        return found.name

    async def body(self, model: type[W]) -> W:
        return parse(model, await self.request.body())

    def text(self, name: str) -> str | None:
        """A query parameter; None when it is absent or empty."""
        return self.query.get(name, [""])[-1] or None

    def flag(self, name: str, *, default: bool) -> bool:
        given = self.text(name)
        if given is None:
            return default
        if given.lower() not in {"true", "false"}:
            raise InvalidRequest(f"{name} is {given!r}, and it can be true or false.")
        return given.lower() == "true"

    def items(self) -> int:
        """MaxItems. 0 is as many as without it."""
        given = self.text("MaxItems") or "0"
        if not (given.isascii() and given.isdecimal() and len(given) < 6 and int(given) <= ITEMS_MAX):
            raise InvalidRequest(f"MaxItems is {given[:20]!r}, and it can be 0 to {ITEMS_MAX}.")
        return int(given) or ITEMS

    def instant(self, name: str) -> datetime | None:
        """As ISO 8601, as clients write it, or as seconds since 1970."""
        given = self.text(name)
        if given is None:
            return None
        try:
            found = datetime.fromtimestamp(float(given), UTC)
        except (ValueError, OverflowError, OSError):
            try:
                found = datetime.fromisoformat(given)
            except ValueError:
                raise InvalidRequest(f"{name} is no instant.", hint="Write it as 2026-01-31T23:59:59Z.") from None
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found
