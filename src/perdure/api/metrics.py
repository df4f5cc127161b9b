"""The server's numbers in the text formats of Prometheus and OpenMetrics.

Counts and distributions are those of ``core.metrics``; gauges are read when somebody asks. prometheus-client is imported then,
and not before: a server that nobody scrapes need not have it in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import perdure
from perdure.core import metrics
from perdure.core.metrics import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def exposition(gauges: Sequence[Gauge], accept: str) -> tuple[bytes, str]:
    """What ``GET /metrics`` answers to a scraper that accepts this, and the content type."""
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(accept)
    return encode(_registry(gauges)), content_type


def _registry(gauges: Sequence[Gauge]) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(gauges))  # its base class would have to be imported before it is used
    return registry


class _Collector:
    def __init__(self, gauges: Sequence[Gauge]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        yield InfoMetricFamily("perdure_build", "This server.", value={"version": perdure.__version__})
        for one in metrics.ALL:
            yield _counter(one) if isinstance(one, Counter) else _histogram(one)
        for gauge in self._gauges:
            family = GaugeMetricFamily(gauge.name, gauge.about, labels=gauge.labels)
            for labels, value in gauge.values.items():
                family.add_metric(labels, value)
            yield family


def _counter(counter: Counter) -> Any:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(counter.name, counter.about, labels=counter.labels)
    for labels, value in counter.values.items():
        family.add_metric(labels, value)
    return family


def _histogram(histogram: Histogram) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(histogram.name, histogram.about, labels=histogram.labels)
    for labels, found in histogram.values.items():
        family.add_metric(labels, list(_cumulative(histogram.bounds, found.buckets)), found.total)
    return family


def _cumulative(bounds: Iterable[float], buckets: Sequence[int]) -> Iterator[tuple[str, float]]:
    count = 0
    for bound, in_it in zip((*map(float, bounds), float("inf")), buckets, strict=True):
        count += in_it
        yield ("+Inf" if bound == float("inf") else str(bound), count)
