"""The current values of all metrics, and how prometheus_client reads them.

One thread writes and reads, so a sample costs a bisection and two additions and takes no lock.
Bounded: a metric has at most MAX_CHILDREN label sets; what is beyond is counted under "other".
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .metric_table import Metric

MAX_CHILDREN = 300
OTHER = "other"

Labels: TypeAlias = tuple[str, ...]


@dataclass(slots=True)
class Number:
    """A counter's or a gauge's value."""

    value: float = 0.0


@dataclass(slots=True)
class Buckets:
    """A histogram; `counts` are not cumulative, and have one more than there are bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, samples up to it), as the exposition has it."""
        found, seen = [], 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            seen += count
            found.append((floatToGoString(bound), float(seen)))  # type: ignore[no-untyped-call]
        return found


class MetricStore(Collector):
    """Of a fixed set of metrics. `prefix` comes before every name."""

    def __init__(self, metrics: Iterable[Metric], prefix: str, model_name: str) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._prefix = prefix
        self._model_name = model_name
        self._numbers: dict[str, dict[Labels, Number]] = {}
        self._buckets: dict[str, dict[Labels, Buckets]] = {}
        for metric in self._metrics.values():
            if metric.buckets:
                self._buckets[metric.name] = {}
            else:
                self._numbers[metric.name] = {}
            if not metric.labels and metric.kind != "gauge":
                self.histogram(metric) if metric.buckets else self.number(metric)

    def number(self, metric: Metric, *labels: str) -> Number:
        """The value to change; keep it where it is changed often."""
        children = self._numbers[metric.name]
        labels = _bounded(labels, children)
        return children.setdefault(labels, Number())

    def histogram(self, metric: Metric, *labels: str) -> Buckets:
        """Where to observe; keep it where it is done often."""
        children = self._buckets[metric.name]
        labels = _bounded(labels, children)
        found = children.get(labels)
        if found is None:
            found = children[labels] = Buckets(metric.buckets)
        return found

    def forget(self, metric: Metric, *labels: str) -> None:
        """Drop all series of a counter or gauge whose labels begin like this."""
        children = self._numbers[metric.name]
        for values in [values for values in children if values[: len(labels)] == labels]:
            del children[values]

    def collect(self) -> Iterator[Family]:
        for metric in self._metrics.values():
            labels = ("model_name", *metric.labels)
            name = self._prefix + metric.name
            if metric.buckets:
                histogram = HistogramMetricFamily(name, metric.help, labels=labels)
                for values, child in self._buckets[metric.name].items():
                    own = (self._model_name, *values)
                    histogram.add_metric(own, child.cumulative(), sum_value=child.total)
                yield histogram
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name, metric.help, labels=labels)
            for values, number in self._numbers[metric.name].items():
                family.add_metric((self._model_name, *values), number.value)
            yield family


def _bounded(labels: Labels, children: Mapping[Labels, object]) -> Labels:
    """The labels, or "other" for all where a new child would be one too many."""
    if labels in children or len(children) < MAX_CHILDREN:
        return labels
    return (OTHER,) * len(labels)
