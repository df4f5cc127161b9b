"""Who is told to slow down, and who is not for somebody else's sake."""

from __future__ import annotations

import pytest

from perdure.access.model import OPERATOR, Principal
from perdure.api.errors import error_response
from perdure.api.throttle import EXECUTING_FACTOR, FAILURES_BURST, Throttle, network
from perdure.core.config import Settings
from perdure.core.errors import RateLimited
from perdure.core.ids import TenantId
from tests.fakes.clock import FakeClock

AGENT = Principal("key:key_1", TenantId("ten_a"), frozenset())


def test_a_key_that_calls_too_often_is_told_how_long_to_wait() -> None:
    clock = FakeClock()
    throttle = Throttle(Settings(rate_limit_per_s=2, rate_limit_burst=3), clock)
    for _ in range(3):
        throttle.called(AGENT)
    with pytest.raises(RateLimited) as caught:
        throttle.called(AGENT)
    assert caught.value.details == {"retry_after_s": "0.5"}
    answer = error_response(caught.value)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1"), "the header knows whole seconds only"
    throttle.called(OPERATOR)
    clock.advance(0.5)
    throttle.called(AGENT)


def test_wrong_keys_are_counted_by_address() -> None:
    throttle = Throttle(Settings(auth_failures_per_min=6), FakeClock())
    for _ in range(FAILURES_BURST):
        throttle.failed("192.0.2.1")
    with pytest.raises(RateLimited) as caught:
        throttle.failed("192.0.2.1")
    assert caught.value.details == {"retry_after_s": "10"}
    throttle.failed("192.0.2.2")
    throttle.called(AGENT)


EXECUTING = (
    b"/v1/workers",
    b"/v1/workers/wkr_1/take",
    b"/v1/executions/exe_1/invocations/inv_1/answer",
    b"/2025-12-01/durable-executions/arn%3Aaws%3Alambda%2Fx/checkpoint",
    b"/2025-12-01/durable-executions/arn%3Aaws/state",
    b"/2025-12-01/durable-execution-callbacks/abc/heartbeat",
)
ASKING = (b"/v1/workspaces", b"/v1/executions", b"/v1/workersx", b"/2025-12-01/durable-executions/arn/stop")


def test_what_executions_say_is_counted_apart() -> None:
    throttle = Throttle(Settings(rate_limit_per_s=1, rate_limit_burst=1), FakeClock())
    for number in range(EXECUTING_FACTOR):
        throttle.called(AGENT, EXECUTING[number % len(EXECUTING)])
    for path in EXECUTING:
        with pytest.raises(RateLimited):
            throttle.called(AGENT, path)
    throttle.called(AGENT, ASKING[0])
    for path in ASKING:
        with pytest.raises(RateLimited):
            throttle.called(AGENT, path)


def test_zero_turns_it_off() -> None:
    throttle = Throttle(Settings(rate_limit_per_s=0, auth_failures_per_min=0), FakeClock())
    for _ in range(5000):
        throttle.called(AGENT)
        throttle.failed("192.0.2.1")


@pytest.mark.parametrize(
    ("peer", "whose"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("unix", "unix"),
    ],
)
def test_an_ipv6_network_is_one_owners(peer: str, whose: str) -> None:
    assert network(peer) == whose
