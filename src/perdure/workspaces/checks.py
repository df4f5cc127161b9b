"""What a request for a workspace must satisfy. Pure; each refusal says the rule and what to ask for instead."""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.core.errors import InvalidRequest, NotFound
from perdure.core.ids import SNAPSHOT_NAME, check_name
from perdure.workspaces.catalog import ImageFacts
from perdure.workspaces.model import AsleepAction, Configuration, Workspace
from perdure.workspaces.store import NewWorkspace

__all__ = [
    "ImageFacts",
    "check_alarm",
    "check_configuration",
    "check_disk",
    "check_fork",
    "check_keep_awake",
    "check_long_sleep",
    "check_new",
    "check_snapshot_name",
    "is_deleted",
]

FORK_LIMIT = 64
DISK_LIMIT_GIB = 2048
VCPU_LIMIT = 64
MEMORY_RANGE_MIB = (128, 1 << 20)  # the least that an image may have, so that no hint leads to a second refusal
TIMER_LIMIT_S = 366 * 86400.0
IDLE_LEAST_S = 5.0  # shorter, it would fall asleep between two requests of one conversation
KEEP_AWAKE_LIMIT_S = 30 * 86400.0
ALARM_LIMIT = timedelta(days=10 * 366)
DAYS_RANGE = (1.0, 3660.0)
KEEP_LIMIT = 1000
MAP_LIMIT = 100
VALUE_LIMIT = 4096
BRANCH_BASE_LENGTH = 44  # leaves room for a number in a name of 50 characters


def check_new(new: NewWorkspace, image: ImageFacts) -> None:
    low, high = MEMORY_RANGE_MIB
    if not low <= new.memory_mib <= high:
        raise InvalidRequest(f"{new.memory_mib} MiB of memory are out of range.", hint=f"Ask for {low} to {high} MiB.")
    if new.memory_mib < image.min_memory_mib:
        raise InvalidRequest(
            f"{new.memory_mib} MiB of memory are too little for the image {image.name!r}.",
            hint=f"It needs {image.min_memory_mib} MiB, and gets {image.default_size.memory_mib} MiB when none are asked for.",
        )
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
    check_long_sleep(new.asleep_after_days, new.asleep_action)
    for what, mapping in (("metadata", new.metadata), ("environment", new.environment)):
        if len(mapping) > MAP_LIMIT or any(len(key) > VALUE_LIMIT or len(value) > VALUE_LIMIT for key, value in mapping.items()):
            raise InvalidRequest(f"The {what} is too large.", hint=f"At most {MAP_LIMIT} entries of {VALUE_LIMIT} characters.")
        if any("\0" in key or "\0" in value for key, value in mapping.items()):
            raise InvalidRequest(f"The {what} contains a zero character.", hint="Leave it out.")


def check_timers(idle_timeout_s: float | None, checkpoint_interval_s: float | None) -> None:
    if checkpoint_interval_s is not None and not 0 <= checkpoint_interval_s <= TIMER_LIMIT_S:
        raise InvalidRequest(
            f"{checkpoint_interval_s:g} seconds is no checkpoint interval.", hint="Give seconds, 0 to turn it off."
        )
    if idle_timeout_s is not None and idle_timeout_s != 0 and not IDLE_LEAST_S <= idle_timeout_s <= TIMER_LIMIT_S:
        raise InvalidRequest(
            f"{idle_timeout_s:g} seconds is no idle timeout.", hint=f"Give {IDLE_LEAST_S:g} seconds or more, or 0 for never."
        )


def check_long_sleep(days: float | None, action: AsleepAction) -> None:
    """Days and action belong together."""
    low, high = DAYS_RANGE
    if days is not None and not low <= days <= high:
        raise InvalidRequest(f"{days:g} days asleep are out of range.", hint=f"Give {low:g} to {high:g} days.")
    if days is None and action is not AsleepAction.KEEP:
        raise InvalidRequest(f"After how many days asleep is it to {action.value}?", hint="Give asleep_after_days too.")
    if days is not None and action is AsleepAction.KEEP:
        raise InvalidRequest(
            f"What is to become of it after {days:g} days asleep?", hint="Give asleep_action too: archive or delete."
        )


def check_alarm(when: datetime | timedelta | None, now: datetime) -> None:
    """A time that has passed is as good as now."""
    if isinstance(when, datetime) and when.tzinfo is None:
        raise InvalidRequest("A time without its offset from UTC may mean any hour.", hint="Write it like 2026-12-24T18:00:00Z.")
    late = when if isinstance(when, timedelta) else None if when is None else when - now
    if late is not None and late > ALARM_LIMIT:
        raise InvalidRequest("That is too far in the future.", hint=f"Give a time within {ALARM_LIMIT.days // 366} years.")
    if isinstance(when, timedelta) and when < timedelta(0):
        raise InvalidRequest("That is in the past.", hint="Give 0 seconds or more from now.")


def is_deleted(workspace: Workspace) -> NotFound:
    return NotFound(f"Workspace {workspace.name!r} is deleted.")


def check_keep(count: int | None) -> None:
    if count is not None and not 0 <= count <= KEEP_LIMIT:
        raise InvalidRequest(
            f"{count} snapshots cannot be kept.",
            hint=f"Give 0 to {KEEP_LIMIT}; it counts those that nobody asked for. Named and requested ones stay anyway.",
        )


def check_configuration(change: Configuration) -> None:
    if all(value is None for value in change.given().values()):
        raise InvalidRequest(
            "There is nothing to change.",
            hint="Give keep_snapshots, idle_timeout_s, checkpoint_interval_s, asleep_after_days or asleep_action.",
        )
    check_timers(change.idle_timeout_s, change.checkpoint_interval_s)
    if change.keep_snapshots != "default":
        check_keep(change.keep_snapshots)


def check_disk(disk_gib: int) -> None:
    if not 1 <= disk_gib <= DISK_LIMIT_GIB:
        raise InvalidRequest(f"A disk of {disk_gib} GiB is out of range.", hint=f"Ask for 1 to {DISK_LIMIT_GIB} GiB.")


def check_snapshot_name(name: str) -> None:
    if not SNAPSHOT_NAME.fullmatch(name):
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
