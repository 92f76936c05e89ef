"""Sampling against independent NumPy arithmetic, core's mixer and the chi-square distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.core.request.request import mix64, token_key
from baton.core.request.sampling_params import SamplingParams
from baton.kernels.sampling import sampling
from baton.kernels.sampling.logit_adjustment import filter_logits
from baton.kernels.sampling.sample_spec import SampleSpec
from baton.kernels.sampling.sampling import sample

WORDS = st.integers(0, 2**64 - 1)


def drawn(
    key: int, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> SampleSpec:
    return SampleSpec(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p), key)


@settings(max_examples=50, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=40))
def test_mix64_equals_the_integer_mixer_bit_for_bit(words: list[int]) -> None:
    mixed = sampling.mix64(torch.tensor([sampling.as_signed(word) for word in words]))
    assert [value % 2**64 for value in mixed.tolist()] == [mix64(word) for word in words]


def reference_noise(key: int, vocab_size: int) -> np.ndarray:
    """Gumbel noise in float64 from Python integers."""
    golden = 0x9E3779B97F4A7C15
    bits = [mix64(key + (i + 1) * golden) for i in range(vocab_size)]
    v = np.array([((word >> 1) + 0.5) / 2.0**63 for word in bits])
    return -np.log(-np.log1p(-v))


@settings(max_examples=20, deadline=None)
@given(WORDS)
def test_noise_is_gumbel_of_the_mixed_key(key: int) -> None:
    noise = sampling.gumbel_noise(torch.tensor([sampling.as_signed(key)]), 200)
    assert noise.isfinite().all()
    expected = reference_noise(key, 200)
    # 1 - v is rounded to 2**-25, which matters most where the noise is smallest: d log(E) = dE / E.
    exponential = np.exp(-expected)
    allowed = 4e-6 + 1e-5 * np.abs(expected) + 2.0**-24 * np.exp(exponential) / exponential
    assert (np.abs(noise[0].numpy() - expected) <= allowed).all()


def test_noise_is_finite_at_both_ends_of_the_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[0, -1, 1, -2]])  # bits: all zero, all one, and their neighbours
    monkeypatch.setattr(sampling, "mix64", lambda value: ends)
    noise = sampling.gumbel_noise(torch.tensor([7]), 4)[0]
    assert noise.isfinite().all()
    assert noise[0] == pytest.approx(64 * np.log(2), rel=1e-5)  # v = 2**-64
    assert noise[1] == pytest.approx(-np.log(24 * np.log(2)), rel=1e-5)  # v = 1 - 2**-24


def reference_probs(
    logits: np.ndarray, temperature: float, top_k: int | None, top_p: float
) -> np.ndarray:
    """The expected distribution, by sorting in plain Python."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order if top_k is None else order[:top_k]
    total, before, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if nucleus and top_p < 1 and before >= top_p * total:  # 1 keeps what rounding would drop
            break
        nucleus.append(i)
        before += weights[i]
    probs = np.zeros_like(weights)
    probs[nucleus] = weights[nucleus]
    return probs / probs.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, None, 1.0),
        (0.7, None, 1.0),
        (1.5, 5, 1.0),
        (1.0, None, 0.8),
        (0.9, 8, 0.7),
        (1.3, 1, 1.0),
        (1.0, None, 1e-6),
    ],
)
def test_tokens_follow_the_filtered_distribution(
    temperature: float, top_k: int | None, top_p: float
) -> None:
    num_draws = 20_000
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 2, 24).astype(np.float32))
    rows = [
        drawn(token_key(9, 0, i), temperature=temperature, top_k=top_k, top_p=top_p)
        for i in range(num_draws)
    ]
    token_ids, _ = sample(logits.expand(num_draws, -1), rows)
    counts = np.bincount(token_ids.numpy(), minlength=24)
    probs = reference_probs(logits.numpy(), temperature, top_k, top_p)
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * num_draws
    chi_square = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Mean f, deviation sqrt(2 f): five deviations; the draws are the same in every run.
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom)


def test_chi_square_would_notice_a_wrong_temperature() -> None:
    num_draws = 20_000
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 2, 24).astype(np.float32))
    rows = [drawn(token_key(9, 0, i), temperature=0.9) for i in range(num_draws)]
    counts = np.bincount(sample(logits.expand(num_draws, -1), rows)[0].numpy(), minlength=24)
    expected = reference_probs(logits.numpy(), 1.0, None, 1.0) * num_draws
    assert ((counts - expected) ** 2 / expected).sum() > 23 + 5 * np.sqrt(46)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.one_of(st.none(), st.integers(1, 40)),
    st.floats(0.01, 1.0),
    st.floats(0.1, 2.0),
)
@example(0, None, 1.0, 0.125)  # the last tokens sum to less than rounding error
@example(0, None, 1.0 - 1e-12, 0.125)  # 1 in float32
def test_filters_keep_what_the_reference_keeps(
    seed: int, top_k: int | None, top_p: float, temperature: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, 30).astype(np.float32)
    scaled = torch.from_numpy(logits)[None] / temperature
    kept = filter_logits(
        scaled, torch.tensor([min(top_k or 30, 30)]), torch.tensor([top_p], dtype=torch.float32)
    )[0]
    wanted = reference_probs(logits, temperature, top_k, top_p)
    # Rounding may move the one token at the edge of the nucleus, and those of a tail smaller than
    # its error, and no other.
    is_differing = kept.isfinite().numpy() != (wanted > 0)
    differing = np.sort(reference_probs(logits, temperature, top_k, 1.0)[is_differing])
    assert differing[:-1].sum() < 1e-6
    assert torch.equal(kept[kept.isfinite()], scaled[0][kept.isfinite()])


def test_top_p_of_one_keeps_every_token_of_a_long_tail() -> None:
    logits = torch.linspace(0, -40, 5000)[None]
    kept = filter_logits(logits, torch.tensor([5000]), torch.tensor([1.0]))
    assert torch.equal(kept, logits)


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [17, 400, 999]] = 5.0
    logits[1, [999, 998]] = 2.0
    greedy = drawn(3, temperature=0.0)
    assert sample(logits, [greedy] * 3)[0].tolist() == [17, 998, 0]


def test_logprob_is_of_the_unfiltered_distribution() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 3, (2, 50)).astype(np.float32))
    rows = [drawn(5, temperature=0.3, top_k=3, top_p=0.5), drawn(0, temperature=0.0)]
    token_ids, logprobs = sample(logits, rows)
    for row, token_id, logprob in zip(logits.double(), token_ids, logprobs, strict=True):
        wanted = row[token_id] - torch.log(torch.exp(row).sum())
        assert float(logprob) == pytest.approx(float(wanted), abs=1e-5)


def test_a_tiny_temperature_is_greedy_not_nan() -> None:
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0)) * 50
    token_ids, logprobs = sample(logits, [drawn(11, temperature=1e-45, top_p=0.9)])
    assert token_ids.tolist() == logits.argmax(-1).tolist()
    assert logprobs.isfinite().all()


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_token_does_not_depend_on_its_batch(random) -> None:
    logits = torch.randn(12, 333, generator=torch.Generator().manual_seed(random.randrange(2**31)))
    rows = [
        drawn(
            random.getrandbits(64),
            temperature=random.choice([0.0, 0.5, 1.3]),
            top_k=random.choice([None, 4, 1000]),
            top_p=random.choice([1.0, 0.7]),
        )
        for _ in range(12)
    ]
    alone = [sample(logits[i : i + 1], rows[i : i + 1]) for i in range(12)]
    order = random.sample(range(12), random.randint(1, 12))
    token_ids, logprobs = sample(logits[order], [rows[i] for i in order])
    assert token_ids.tolist() == [int(alone[i][0]) for i in order]
    assert logprobs.tolist() == [float(alone[i][1]) for i in order]
