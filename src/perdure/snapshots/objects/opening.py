"""An object store from its settings: URL, options, keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from perdure.core.errors import InvalidRequest, NotFound
from perdure.snapshots.objects.client import ClientSettings, ObstoreObjects, open_objects
from perdure.snapshots.objects.keys import Keyring
from perdure.snapshots.objects.remote import OWNER, Remote

#: A request that has no answer after this long is tried again; all tries together end soon after, for the caller comes back.
ATTEMPT_S = 30.0
RETRY_S = 45.0
#: Somebody waits at a terminal for the answer of ``probe``.
_PROBE_S = 5.0
_YES = {"true": True, "false": False}


def open_remote(url: str, options: Iterable[str], keyring: Keyring, now_ms: Callable[[], int]) -> Remote:
    """Raises InvalidRequest in one sentence for a URL or an option that is none. Nothing is sent yet."""
    return Remote(_opened(url, options, ATTEMPT_S, RETRY_S, retries=4), keyring, now_ms)


def open_objects_only(url: str, options: Iterable[str]) -> ObstoreObjects:
    """The objects, without what this knows of snapshots. Raises as ``open_remote`` does."""
    return _opened(url, options, ATTEMPT_S, RETRY_S, retries=4)


def check(url: str, options: Iterable[str]) -> None:
    """Raises what ``open_remote`` would raise: whoever starts something may ask before anything else is begun."""
    _opened(url, options, ATTEMPT_S, RETRY_S, retries=4)


class Found(StrEnum):
    """What a look at a store finds."""

    CLAIMED = "claimed"  # it says whose it is
    EMPTY = "empty"
    STRANGE = "strange"  # it holds something, and does not say whose it is


async def probe(url: str, options: Iterable[str]) -> Found:
    """Look at the store once. Raises InvalidRequest or Unavailable."""
    objects = _opened(url, options, _PROBE_S, _PROBE_S, retries=1)
    try:
        await objects.get(OWNER)
    except NotFound:
        async for _ in objects.list(""):
            return Found.STRANGE
        return Found.EMPTY
    return Found.CLAIMED


def _opened(url: str, options: Iterable[str], attempt_s: float, retry_s: float, *, retries: int) -> ObstoreObjects:
    return open_objects(url, ClientSettings(parse_options(options), attempt_s, retry_s, retries))


def parse_options(options: Iterable[str]) -> dict[str, Any]:
    """``NAME=VALUE`` for obstore. An endpoint without TLS is taken as meant."""
    found: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.strip():
            raise InvalidRequest(
                f"The object store's option {name!r} is not NAME=VALUE.",
                hint="Write PERDURE_STORE_OPTIONS=endpoint=http://127.0.0.1:9000,region=eu-west-1, for instance.",
            )
        found[name.strip()] = _YES.get(value.strip().lower(), value.strip())
    if any(isinstance(value, str) and value.startswith("http://") for value in found.values()):
        found["client_options"] = {"allow_http": True}
    return found
