"""Which requests are AWS's. Told by the path as it came: an ARN in it has slashes, which only their encoding keeps apart."""

from __future__ import annotations

from starlette.types import Scope

_PREFIXES = (b"/2015-03-31/functions/", b"/2025-12-01/")
#: How Step Functions' operations are named in the header X-Amz-Target (its protocol is JSON 1.0: one path for all of them).
TARGET_PREFIX = "AWSStepFunctions."


def is_aws(scope: Scope) -> bool:
    return scope["type"] == "http" and (scope["raw_path"].startswith(_PREFIXES) or task_target(scope) is not None)


def task_target(scope: Scope) -> str | None:
    """The operation of Step Functions that a request is for; None: it is for none."""
    if scope["raw_path"] != b"/" or scope["method"] != "POST":
        return None
    target = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-amz-target"), "")
    return target.removeprefix(TARGET_PREFIX) if target.startswith(TARGET_PREFIX) else None


def segments(raw_path: bytes) -> list[str]:
    """Still encoded."""
    return raw_path.decode("latin-1").split("/")[1:]
