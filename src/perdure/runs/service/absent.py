"""The service of a release that does not serve durable executions."""

from __future__ import annotations

from typing import cast

from perdure.core.errors import Unavailable
from perdure.runs.service.model import Executions


class _Absent:
    def __getattr__(self, name: str) -> object:
        async def refuse(*_: object, **__: object) -> None:
            raise Unavailable("Durable executions are not served by this release yet.", hint="Use a later release.")

        return refuse


def absent() -> Executions:
    return cast(Executions, _Absent())
