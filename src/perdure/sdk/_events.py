"""Lines of streams that the server answers: each raises the error that ended its stream."""

from __future__ import annotations

from perdure.sdk.errors import rebuild
from perdure.wire import public


def watch_event(line: bytes) -> public.WatchEvent:
    """One line of a watch's stream; raises the error that ended it."""
    event = public.WatchEvent.model_validate_json(line)
    if event.type == "error":
        raise rebuild({"error": event.error.model_dump() if event.error else None}, 500)
    return event


def verify_event(line: bytes) -> public.VerifyEvent:
    """One line of a verification's stream; raises the error that ended it."""
    event = public.VerifyEvent.model_validate_json(line)
    if event.type == "error":
        raise rebuild({"error": event.error.model_dump() if event.error else None}, 500)
    return event


def histories_event(line: bytes) -> public.HistoriesEvent:
    """One line of a stream that verifies histories; raises the error that ended it."""
    event = public.HistoriesEvent.model_validate_json(line)
    if event.type == "error":
        raise rebuild({"error": event.error.model_dump() if event.error else None}, 500)
    return event


def backup_event(line: bytes) -> public.BackupEvent:
    """One line of a backup's stream; raises the error that ended it."""
    event = public.BackupEvent.model_validate_json(line)
    if event.type == "error":
        raise rebuild({"error": event.error.model_dump() if event.error else None}, 500)
    return event


def image_event(line: bytes) -> public.BuildEvent:
    """One line of a build's stream; raises the error that ended it."""
    event = public.BuildEvent.model_validate_json(line)
    if event.type == "error":
        raise rebuild({"error": event.error.model_dump() if event.error else None}, 500)
    return event
