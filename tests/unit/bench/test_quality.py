"""Weights in FP8 and int4 keep the bundled model's quality."""

from __future__ import annotations

import pytest

from baton.bench.cpu_families import quality


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_perplexity_is_at_most_half_a_percent_above_and_in_int4_four() -> None:
    plain, *quantised = quality.measure()
    assert 2 < plain.median < 100, "it has not learnt this"
    assert len(quantised) == 8
    for figure in quantised:
        assert figure.is_met, f"{figure.name}: {figure.median:.4f} beside {plain.median:.4f}"
