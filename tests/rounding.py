"""Results that are equal up to rounding: the order of sums in a GEMM depends on its shape and the
processor.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.engine.execution.batch import SampledToken

ROUNDING = 1e-5  # of a float32 log-probability; a wrong block changes one by far more than 1e-3


def assert_same_but_for_rounding(
    found: Sequence[SampledToken | None], wanted: Sequence[SampledToken | None]
) -> None:
    """Assert the same tokens, with the same log-probabilities up to rounding."""
    for one, other in zip(found, wanted, strict=True):
        assert one is not None and other is not None
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=ROUNDING)
