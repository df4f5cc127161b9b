"""What a request for a workspace must satisfy. Pure; each refusal says the rule and what to ask for instead."""

from __future__ import annotations

import re

from perdure.core.errors import InvalidRequest
from perdure.core.ids import check_name
from perdure.workspaces.catalog import ImageFacts
from perdure.workspaces.model import Configuration
from perdure.workspaces.store import NewWorkspace

__all__ = [
    "ImageFacts",
    "check_configuration",
    "check_disk",
    "check_fork",
    "check_keep_awake",
    "check_new",
    "check_snapshot_name",
]

FORK_LIMIT = 64
DISK_LIMIT_GIB = 2048
VCPU_LIMIT = 64
MEMORY_RANGE_MIB = (128, 1 << 20)  # the least that an image may have, so that no hint leads to a second refusal
TIMER_LIMIT_S = 366 * 86400.0
KEEP_AWAKE_LIMIT_S = 30 * 86400.0
KEEP_LIMIT = 1000
MAP_LIMIT = 100
VALUE_LIMIT = 4096
BRANCH_BASE_LENGTH = 44  # leaves room for a number in a name of 50 characters

_SNAPSHOT_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")


def check_new(new: NewWorkspace, image: ImageFacts) -> None:
    low, high = MEMORY_RANGE_MIB
    if not low <= new.memory_mib <= high:
        raise InvalidRequest(f"{new.memory_mib} MiB of memory are out of range.", hint=f"Ask for {low} to {high} MiB.")
    if not 1 <= new.vcpus <= VCPU_LIMIT:
        raise InvalidRequest(f"{new.vcpus} vCPUs are out of range.", hint=f"Ask for 1 to {VCPU_LIMIT}.")
    check_disk(new.disk_gib)
    if new.disk_gib < image.disk_gib:
        raise InvalidRequest(
            f"A disk of {new.disk_gib} GiB is smaller than that of image {image.name!r} ({image.disk_gib} GiB).",
            hint=f"Ask for {image.disk_gib} GiB or more.",
        )
    check_timers(new.idle_timeout_s, new.checkpoint_interval_s)
    check_keep(new.keep_snapshots)
    for what, mapping in (("metadata", new.metadata), ("environment", new.environment)):
        if len(mapping) > MAP_LIMIT or any(len(key) > VALUE_LIMIT or len(value) > VALUE_LIMIT for key, value in mapping.items()):
            raise InvalidRequest(f"The {what} is too large.", hint=f"At most {MAP_LIMIT} entries of {VALUE_LIMIT} characters.")
        if any("\0" in key or "\0" in value for key, value in mapping.items()):
            raise InvalidRequest(f"The {what} contains a zero character.", hint="Leave it out.")


def check_timers(idle_timeout_s: float | None, checkpoint_interval_s: float | None) -> None:
    for what, seconds in (("idle timeout", idle_timeout_s), ("checkpoint interval", checkpoint_interval_s)):
        if seconds is not None and not 0 <= seconds <= TIMER_LIMIT_S:
            raise InvalidRequest(f"{seconds:g} seconds is no {what}.", hint="Give seconds, 0 to turn it off.")


def check_keep(count: int | None) -> None:
    if count is not None and not 0 <= count <= KEEP_LIMIT:
        raise InvalidRequest(
            f"{count} snapshots cannot be kept.",
            hint=f"Give 0 to {KEEP_LIMIT}; it counts those that nobody asked for. Named and requested ones stay anyway.",
        )


def check_configuration(change: Configuration) -> None:
    if all(value is None for value in change.given().values()):
        raise InvalidRequest("There is nothing to change.", hint="Give keep_snapshots, idle_timeout_s or checkpoint_interval_s.")
    check_timers(change.idle_timeout_s, change.checkpoint_interval_s)
    if change.keep_snapshots != "default":
        check_keep(change.keep_snapshots)


def check_disk(disk_gib: int) -> None:
    if not 1 <= disk_gib <= DISK_LIMIT_GIB:
        raise InvalidRequest(f"A disk of {disk_gib} GiB is out of range.", hint=f"Ask for 1 to {DISK_LIMIT_GIB} GiB.")


def check_snapshot_name(name: str) -> None:
    if not _SNAPSHOT_NAME.match(name) or name.startswith("snp_"):
        raise InvalidRequest(
            f"{name!r} is not a snapshot name.",
            hint="Use 1 to 63 letters, digits, dots, dashes and underscores, starting with a letter or digit (not 'snp_').",
        )


def check_fork(count: int, names: tuple[str, ...]) -> None:
    if not 1 <= count <= FORK_LIMIT:
        raise InvalidRequest(f"{count} is no number of branches.", hint=f"Ask for 1 to {FORK_LIMIT} at a time.")
    for name in names:
        check_name(name)
    if names and len(set(names)) != count:
        raise InvalidRequest(f"{count} branches need {count} different names.", hint="Leave the names out to have them made up.")


def check_keep_awake(seconds: float) -> None:
    if not 0 <= seconds <= KEEP_AWAKE_LIMIT_S:
        raise InvalidRequest(
            f"{seconds:g} seconds are out of range.",
            hint=f"Give 0 to {KEEP_AWAKE_LIMIT_S:.0f} seconds; 0 ends it.",
        )
