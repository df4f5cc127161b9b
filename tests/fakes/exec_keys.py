"""Idempotency keys of commands in memory."""

from __future__ import annotations

from perdure.workspaces.exec_keys import ExecKey, KeyedExecs


class FakeExecKeys:
    """An ``ExecKeyStore``."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], ExecKey] = {}

    async def claim(self, wanted: ExecKey) -> ExecKey | None:
        known = self.rows.setdefault((wanted.workspace_id, wanted.key), wanted)
        return None if known is wanted else known

    async def release(self, wanted: ExecKey) -> None:
        self.rows.pop((wanted.workspace_id, wanted.key), None)


def fake_keyed_execs() -> KeyedExecs:
    return KeyedExecs(FakeExecKeys())
