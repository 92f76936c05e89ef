"""The peak estimate against a token-by-token simulation, and the estimate of output lengths."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import root_hash
from baton.engine.kv.limits import EngineLimits
from baton.engine.scheduling.admission import Admission, OutputLengthEstimator
from baton.engine.scheduling.peak_blocks import Footprint, peak_blocks
from baton.engine.scheduling.sequence import Sequence


def simulated_peak(footprints: list[Footprint], block_size: int) -> int:
    """Simulate every step with a name for each block, and count the distinct names alive."""
    names: list[list[object]] = [list(f.block_ids) for f in footprints]
    peak = 0
    for step in range(max((f.num_growth_tokens for f in footprints), default=0) + 1):
        alive: set[object] = set()
        for i, footprint in enumerate(footprints):
            if step > footprint.num_growth_tokens and not footprint.is_held:
                continue
            growth = 0 if footprint.is_held else step
            num_blocks = math.ceil((footprint.num_tokens + growth) / block_size)
            while len(names[i]) < num_blocks:
                names[i].append((i, len(names[i])))
            alive.update(names[i][:num_blocks])
        peak = max(peak, len(alive))
    return peak


@st.composite
def footprint_sets(draw: st.DrawFn) -> tuple[list[Footprint], int]:
    """Sequences of a few families; those of one family share some leading blocks."""
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    footprints = []
    for i in range(draw(st.integers(0, 8))):
        num_tokens = draw(st.integers(1, 40))
        num_blocks = math.ceil(num_tokens / block_size)
        family = draw(st.integers(0, 2))
        num_shared = draw(st.integers(0, num_blocks))
        num_own = draw(st.integers(0, num_blocks - num_shared))
        shared = [1000 * family + j for j in range(num_shared)]
        own = [10_000 + 1000 * i + j for j in range(num_own)]
        is_held = draw(st.booleans())
        growth = 0 if is_held else draw(st.integers(0, 40))
        footprints.append(Footprint(num_tokens, growth, shared + own, is_held))
    return footprints, block_size


@given(footprint_sets())
def test_peak_equals_simulation(case: tuple[list[Footprint], int]) -> None:
    footprints, block_size = case
    peak = peak_blocks(footprints, block_size)
    assert peak == simulated_peak(footprints, block_size)
    assert peak_blocks(footprints, block_size, is_bound=True) >= peak


def test_peak_of_the_picture() -> None:
    """3 tokens growing by 9, 5 growing by 3, one token a block: 8 + 6 at step 3, 12 at step 9."""
    assert peak_blocks([Footprint(3, 9, []), Footprint(5, 3, [])], 1) == 14


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(0, 60), st.integers(1, 80))
def test_estimate_is_the_quantile_of_longer_outputs(
    past: list[int], num_generated: int, max_tokens: int
) -> None:
    estimator = OutputLengthEstimator(window=20, quantile=0.9)
    for num_outputs in past:
        estimator.observe(num_outputs)
    longer = sorted(n for n in past[-20:] if n > num_generated)
    expected = max_tokens
    if longer:
        at_least_90_percent = [
            n for n in longer if sum(m <= n for m in longer) >= 0.9 * len(longer)
        ]
        expected = min(max_tokens, at_least_90_percent[0])
    assert estimator.estimate(num_generated, max_tokens) == max(1, expected - num_generated)


def new_sequence(num_tokens: int, max_tokens: int, *, is_held: bool = False) -> Sequence:
    request = Request("r", 0, (7,) * num_tokens, SamplingParams(max_tokens=max_tokens))
    return Sequence(request, arrival=0, is_held=is_held, root_hash=root_hash("m"))


@pytest.fixture
def admission() -> Admission:
    """Admission for 10 blocks of 4 tokens, of which 4 may be held."""
    limits = EngineLimits(12, block_size=4, max_model_len=100, max_held_blocks=4)
    return Admission(limits, OutputLengthEstimator())


def test_the_mean_of_outputs_follows_the_last_few() -> None:
    estimator = OutputLengthEstimator()
    assert estimator.mean == 0
    estimator.observe(10)
    assert estimator.mean == 10
    for num_outputs in (1000,) * 40 + (20, 40) * 16:
        estimator.observe(num_outputs)
    assert estimator.mean == 30


def test_a_candidate_with_nobody_to_wait_for_fits(admission: Admission) -> None:
    assert admission.fits(new_sequence(4, 99), [], [])
    growing = admission.footprints([new_sequence(1, 1)])
    held = admission.footprints([new_sequence(1, 1, is_held=True)])
    assert not admission.fits(new_sequence(4, 99), [], growing)
    assert admission.fits(new_sequence(4, 99), [], held)


def test_a_candidate_fits_to_the_last_block(admission: Admission) -> None:
    # Each sequence will write 4 + 17 - 1 = 20 slots: 5 blocks.
    other = admission.footprints([new_sequence(4, 17)])
    assert admission.fits(new_sequence(4, 17), [], other)
    assert not admission.fits(new_sequence(5, 17), [], other)


def test_credit_counts_shared_blocks_once(admission: Admission) -> None:
    holder = new_sequence(12, 5, is_held=True)
    holder.block_ids = [2, 3, 4]
    assert admission.has_credit(new_sequence(4, 5, is_held=True), [], [holder])
    assert not admission.has_credit(new_sequence(12, 5, is_held=True), [], [holder])
    assert admission.has_credit(new_sequence(12, 5, is_held=True), [2, 3], [holder])
    assert admission.has_credit(new_sequence(40, 5, is_held=True), [], [])
