"""Who calls too often. Counted in this process: several servers of one database count each for itself."""

from __future__ import annotations

import math
import re
from ipaddress import IPv6Address, IPv6Network, ip_address

from perdure.access.buckets import Buckets, Rate
from perdure.access.model import Principal
from perdure.core.clock import Clock
from perdure.core.config import Settings
from perdure.core.errors import RateLimited

#: Wrong keys that an address which has been quiet may send at once.
FAILURES_BURST = 30
#: What running executions say of themselves is counted apart, and may be so many times as much: a step takes a call or two, and
#: a function that is held back has no other way to go on. A key that executes may look at its executions all the while.
EXECUTING_FACTOR = 20

_EXECUTING = re.compile(
    rb"/v1/workers(?:/.*)?"
    rb"|/v1/executions/[^/]+/invocations/.*"
    rb"|/2025-12-01/durable-executions/[^/]+/(?:checkpoint|state)"
    rb"|/2025-12-01/durable-execution-callbacks/.*"
)


class Throttle:
    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock = clock
        failures_per_s = settings.auth_failures_per_min / 60
        self._calls = _buckets(settings, 1)
        self._executing = _buckets(settings, EXECUTING_FACTOR)
        self._failures = Buckets(Rate(failures_per_s, FAILURES_BURST)) if failures_per_s else None

    def called(self, principal: Principal, raw_path: bytes = b"") -> None:
        """A call with a key that counts. Raises RateLimited."""
        buckets = self._executing if _EXECUTING.fullmatch(raw_path) else self._calls
        wait_s = buckets.take(principal.name, self._clock.monotonic()) if buckets is not None else 0.0
        if wait_s:
            raise _limited("This API key makes more calls than it may.", "Call less often, or spread the work over time.", wait_s)

    def failed(self, peer: str) -> None:
        """A call with a wrong key, or none. Raises RateLimited. Who has a key that counts is not kept out by its neighbours."""
        wait_s = self._failures.take(network(peer), self._clock.monotonic()) if self._failures is not None else 0.0
        if wait_s:
            raise _limited("Too many calls with wrong keys came from this address.", "Stop, and look at the key.", wait_s)


def _buckets(settings: Settings, factor: int) -> Buckets | None:
    rate = Rate(settings.rate_limit_per_s * factor, settings.rate_limit_burst * factor)
    return Buckets(rate) if rate.per_s else None


def network(peer: str) -> str:
    """What one owner of an address has of them: the address, or an IPv6 network of 64 bits."""
    try:
        address = ip_address(peer)
    except ValueError:
        return peer
    if not isinstance(address, IPv6Address):
        return peer
    return str(address.ipv4_mapped or IPv6Network((int(address) >> 64 << 64, 64)))


def _limited(message: str, hint: str, wait_s: float) -> RateLimited:
    error = RateLimited(message, hint=hint)
    error.details = {"retry_after_s": f"{math.ceil(wait_s * 1000) / 1000:.12g}"}
    return error
