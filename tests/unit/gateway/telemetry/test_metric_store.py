"""The series that a gateway exports before any event."""

from __future__ import annotations

import pytest

from baton.core.errors import BatonError, EngineFailed, Overloaded, Unavailable
from baton.core.request.request import FinishReason
from baton.gateway.telemetry.metrics import metric_table as table
from baton.gateway.telemetry.metrics.metric_store import MetricStore
from baton.gateway.telemetry.metrics.metric_table import Metric
from baton.gateway.telemetry.metrics.tally import Tally


def values(store: MetricStore, metric: Metric) -> dict[str, float]:
    """Values by the only label."""
    [label] = metric.labels
    name = f"x_{metric.name}"
    return {
        sample.labels[label]: sample.value
        for family in store.collect()
        for sample in family.samples
        if sample.name == name
    }


@pytest.mark.parametrize(
    ("metric", "known"),
    [
        (table.SUCCESSES, {reason.value for reason in FinishReason}),
        (table.FAILURES, {BatonError.code, EngineFailed.code, Unavailable.code, Overloaded.code}),
        (table.REJECTIONS, {Overloaded.code, Unavailable.code}),
    ],
    ids=lambda value: value.name if isinstance(value, Metric) else "",
)
def test_known_series_begin_at_zero(metric: Metric, known: set[str]) -> None:
    """Known series start at zero: Prometheus' rate() ignores a series' first value, and a sum over
    no series is empty, so that a failure ratio would be missing where all calls failed."""
    store = MetricStore("x_", "m")
    begun = values(store, metric)
    assert known <= begun.keys() and set(begun.values()) == {0.0}
    tally = Tally()
    tally.count(metric, 2, min(known))
    store.take(tally)
    assert values(store, metric) == begun | {min(known): 2.0}


def test_series_of_labels_that_come_with_a_call_begin_with_it() -> None:
    assert values(MetricStore("x_", "m"), table.TENANT_REQUESTS) == {}
