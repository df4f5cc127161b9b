"""Keyword arguments with many names, typed once for the async and the sync surface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from perdure.core.errors import InvalidRequest
from perdure.sdk.errors import SpecConflict
from perdure.wire import public


class CreateOptions(TypedDict, total=False):
    """Of ``Workspace.create``. Left out: the image's or the server's default. ``template`` is another name of ``image``."""

    image: str
    template: str
    memory_mib: int
    vcpus: int
    disk_gib: int
    idle_timeout_s: float  # 0: never sleeps by itself
    checkpoint_interval_s: float  # 0: off
    keep_snapshots: int  # of those that nobody asked for, how many of the newest stay, asleep too
    asleep_after_days: float  # asleep for so long, asleep_action is done
    asleep_action: str  # keep, archive (only the object store has it then) or delete (announced a day before)
    allow: Sequence[str]  # HOST:PORT it may reach
    envs: Mapping[str, str]
    metadata: Mapping[str, str]


class ListFilters(TypedDict, total=False):
    """Of ``Workspace.list`` and ``Workspace.iterate``: which workspaces. All of what is given must hold."""

    state: str | Sequence[str]  # in any of these
    metadata: Mapping[str, str]
    image: str  # of this name or digest
    name_prefix: str


class RunOptions(TypedDict, total=False):
    """Of ``commands.run``. Limits end the command, in seconds; None means no limit."""

    envs: Mapping[str, str]
    cwd: str
    user: str
    run_limit_s: float | None
    idle_limit_s: float | None
    kill_grace_s: float
    output_limit_bytes: int  # what a result keeps per stream; default 64 MiB
    idempotency_key: str | None  # the same key in the same workspace is the same command, for a week; it never runs twice


class ProgramOptions(TypedDict, total=False):
    """Of ``program.set``."""

    envs: Mapping[str, str]
    cwd: str | None  # default: the user's home
    user: str | None  # name or uid[:gid] in the workspace; default root
    port: int  # where it answers invocations; 8080
    restart: str  # always (the default), on-failure, never
    stop_grace_s: float  # SIGTERM to SIGKILL; 10


class QuotaOptions(TypedDict, total=False):
    """Of ``Client.set_quota``. Left out: it stays as it is; None: no limit."""

    workspaces: int | None
    memory_awake_mib: int | None
    storage_gib: float | None
    execs: int | None


OUTPUT_LIMIT_BYTES = 64 << 20
_CREATE = {"template": "image", "allow": "egress_allow", "envs": "environment"}


def create_fields(options: CreateOptions) -> dict[str, Any]:
    """The API's names of create options."""
    _known(options, CreateOptions, "Workspace.create")
    return {_CREATE.get(name, name): _plain(value) for name, value in options.items() if value is not None}


def list_query(filters: ListFilters) -> list[tuple[str, str]]:
    """The API's query of list filters."""
    _known(filters, ListFilters, "Workspace.list")
    states = filters.get("state", ())
    query = [("state", state) for state in ([states] if isinstance(states, str) else states)]
    query += [("metadata", f"{key}={value}") for key, value in filters.get("metadata", {}).items()]
    plain = (("image", filters.get("image")), ("name_prefix", filters.get("name_prefix")))
    return query + [(name, value) for name, value in plain if value is not None]


def run_fields(options: RunOptions) -> dict[str, Any]:
    """The API's names of run options."""
    _known(options, RunOptions, "commands.run")
    fields = {"env" if name == "envs" else name: _plain(value) for name, value in options.items() if value is not None}
    for name in ("output_limit_bytes", "idempotency_key"):
        fields.pop(name, None)
    return fields


def program_fields(options: ProgramOptions) -> dict[str, Any]:
    """The API's names of a program's options."""
    _known(options, ProgramOptions, "program.set")
    return {"env" if name == "envs" else name: _plain(value) for name, value in options.items() if value is not None}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _known(options: Mapping[str, Any], kind: type, call: str) -> None:
    if unknown := sorted(set(options) - set(kind.__annotations__)):
        names = ", ".join(sorted(kind.__annotations__))
        raise InvalidRequest(f"{call} has no option {unknown[0]!r}.", hint=f"Its options are {names}.")


def check_same(found: public.WorkspaceInfo, wanted: Mapping[str, Any]) -> None:
    """Raises SpecConflict unless a workspace is of the image and size that are asked for, if any. A larger disk will do."""
    differs = {
        name: f"{getattr(found, name)}, not {wanted[name]}"
        for name in ("memory_mib", "vcpus")
        if name in wanted and getattr(found, name) != wanted[name]
    }
    if wanted.get("disk_gib", 0) > found.disk_gib:
        differs["disk_gib"] = f"{found.disk_gib}, not {wanted['disk_gib']}"
    if wanted.get("image", found.image) not in {found.image, found.image_name}:
        differs["image"] = f"{found.image_name}, not {wanted['image']}"
    if differs:
        said = "; ".join(f"{name} is {text}" for name, text in sorted(differs.items()))
        error = SpecConflict(f"There is a workspace {found.name!r}, but a different one: {said}.")
        error.details = differs
        raise error
