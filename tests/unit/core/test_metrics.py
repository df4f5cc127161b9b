"""Counts, distributions, and what Prometheus makes of them."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from perdure.api.metrics import exposition
from perdure.core import metrics
from perdure.core.errors import Busy
from perdure.core.metrics import Counter, Gauge, Histogram

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> tuple[Counter, Histogram]:
    counter = Counter("perdure_tests", "Counted.", ("kind",))
    histogram = Histogram("perdure_test_seconds", "Taken.", (0.1, 1, 10), ("path",))
    monkeypatch.setattr(metrics, "ALL", (counter, histogram))
    return counter, histogram


def test_counts_and_distributions(own: tuple[Counter, Histogram]) -> None:
    counter, histogram = own
    counter.add(kind="a")
    counter.add(2, kind="a")
    for value in (0.05, 0.1, 0.5, 10, 11):
        histogram.observe(value, path="pooled")
    content, content_type = exposition([Gauge("perdure_now", "Now.", {("x",): 4.0}, ("state",))], "")
    found = samples(content.decode())
    assert content_type.startswith("text/plain")
    assert found["perdure_tests_total", (("kind", "a"),)] == 3
    buckets = [found["perdure_test_seconds_bucket", (("le", le), ("path", "pooled"))] for le in ("0.1", "1.0", "10.0", "+Inf")]
    assert buckets == [2, 3, 4, 5], "a bound belongs to its bucket"
    assert found["perdure_test_seconds_count", (("path", "pooled"),)] == 5
    assert found["perdure_test_seconds_sum", (("path", "pooled"),)] == pytest.approx(21.65)
    assert found["perdure_now", (("state", "x"),)] == 4
    assert found["process_resident_memory_bytes", ()] > 0
    assert any(name == "perdure_build_info" for name, _ in found)


def test_openmetrics_for_who_wants_it(own: tuple[Counter, Histogram]) -> None:
    content, content_type = exposition([], OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert content.endswith(b"# EOF\n")


def test_what_never_happened_is_a_zero_where_it_has_no_labels() -> None:
    found = samples(exposition([], "")[0].decode())
    assert found["perdure_execs_total", ()] >= 0


def test_failures_are_counted_by_code() -> None:
    before = metrics.FAILURES.values.get(("wake", "busy"), 0)
    with pytest.raises(Busy), metrics.failures("wake"):
        raise Busy("Later.")
    assert metrics.FAILURES.values["wake", "busy"] == before + 1


def test_names_are_those_of_prometheus_and_no_label_is_a_users() -> None:
    """A label that grows with tenants or workspaces would be the end of whoever scrapes it."""
    assert len({one.name for one in metrics.ALL}) == len(metrics.ALL)
    for one in metrics.ALL:
        assert re.fullmatch(r"perdure_[a-z_]+", one.name)
        assert not one.name.endswith("_total"), "the format adds it"
        assert set(one.labels) <= {"path", "operation", "code", "decision", "route", "status", "outcome"}
        if isinstance(one, Histogram):
            assert one.name.endswith("_seconds")
            assert list(one.bounds) == sorted(set(one.bounds))
