"""A stage for ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.core.config import Settings
from perdure.workspaces.model import CreateWorkspace
from tests.fakes.ingress import CTX, TASKS, Stage
from tests.fakes.workspaces import fake_services


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    settings = Settings(home=tmp_path, url=None, api_key=None, port_answer_s=30, ingress_domain="ws.localhost")
    services, workspaces = fake_services(settings)
    made = Stage(services, workspaces)
    await workspaces.create(CTX, CreateWorkspace("demo"))
    workspaces.world("demo").programs[80] = made.connect
    yield made
    await asyncio.gather(*made.tasks, return_exceptions=True)
    await services.ports.close()
    left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(TASKS)]
    assert not left, "a request leaves nothing behind"
    assert all(count == 0 for count in workspaces.held.values()), "nor is its workspace held awake"
