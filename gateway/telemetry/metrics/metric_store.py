"""Totals since the start, by metric and labels, which prometheus_client reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .metric_table import ALL, Metric
from .tally import Histogram, Tally

MAX_CHILDREN = 300
OTHER = "other"

Labels: TypeAlias = tuple[str, ...]


class MetricStore(Collector):
    """Values of all metrics, whose names get `prefix`. One thread writes and reads,
    without a lock. A metric has at most MAX_CHILDREN label sets; further ones count as "other"."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._numbers: dict[str, dict[Labels, float]] = {m.name: {} for m in ALL}
        self._histograms: dict[str, dict[Labels, Histogram]] = {m.name: {} for m in ALL}
        for metric in ALL:
            if metric.buckets and not metric.labels:
                self._histograms[metric.name][()] = Histogram()
            elif metric.kind == "counter":
                begun = [(value,) for value in metric.known] if metric.labels else [()]
                self._numbers[metric.name] = dict.fromkeys(begun, 0.0)

    def take(self, tally: Tally) -> None:
        for (name, *labels), number in tally.counts.items():
            if name in self._numbers:
                _add(self._numbers[name], tuple(labels), number)
        for (name, *labels), histogram in tally.histograms.items():
            children = self._histograms[name]
            child = children.setdefault(_bounded(tuple(labels), children), Histogram())
            child.add(histogram.counts, histogram.total)

    def add(self, metric: Metric, *labels: str, value: float = 1) -> None:
        _add(self._numbers[metric.name], labels, value)

    def set(self, metric: Metric, *labels: str, value: float) -> None:
        """Set a gauge, or a counter whose total is kept elsewhere."""
        children = self._numbers[metric.name]
        children[_bounded(labels, children)] = value

    def forget(self, metric: Metric, **labels: str) -> None:
        """Drop all series that have these labels."""
        wanted = [(metric.labels.index(name), value) for name, value in labels.items()]
        for children in (self._numbers[metric.name], self._histograms[metric.name]):
            for values in [*children]:
                if all(values[place] == value for place, value in wanted):
                    del children[values]

    def collect(self) -> Iterator[Family]:
        for metric in ALL:
            labels = ("model_name", *metric.labels)
            name = self._prefix + metric.name
            if metric.buckets:
                bounds = [floatToGoString(bound) for bound in (*metric.buckets, math.inf)]  # type: ignore[no-untyped-call]
                histogram = HistogramMetricFamily(name, metric.help, labels=labels)
                for values, child in self._histograms[metric.name].items():
                    own = (self._model_name, *values)
                    counts = map(float, child.cumulative(metric.buckets))
                    buckets = list(zip(bounds, counts, strict=True))
                    histogram.add_metric(own, buckets, sum_value=child.total)
                yield histogram
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name, metric.help, labels=labels)
            for values, number in self._numbers[metric.name].items():
                family.add_metric((self._model_name, *values), number)
            yield family


def _add(children: dict[Labels, float], labels: Labels, value: float) -> None:
    labels = _bounded(labels, children)
    children[labels] = children.get(labels, 0) + value


def _bounded(labels: Labels, children: Mapping[Labels, object]) -> Labels:
    """The labels, or "other" for each if a new child would be one too many."""
    if labels in children or len(children) < MAX_CHILDREN:
        return labels
    return (OTHER,) * len(labels)
