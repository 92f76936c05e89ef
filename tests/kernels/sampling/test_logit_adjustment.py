"""Logit adjustments against transformers' processors and independent NumPy arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.core.request.request import token_key
from baton.core.request.sampling_params import SAMPLING, SamplingParams
from baton.engine.execution.constraints import TokenCounts, without
from baton.engine.execution.constraints import mask_of as allowed_only
from baton.kernels.sampling.logit_adjustment import adjust_logits, filter_scaled
from baton.kernels.sampling.sample_spec import Counts, SampleSpec, needs_more_than_noise
from baton.kernels.sampling.sampling import sample, token_logprobs
from baton.kernels.sampling.top_logprobs import candidates, top_logprobs

VOCAB_SIZE = 60
ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(0, 3, (rows, VOCAB_SIZE)).astype(np.float32)
    return torch.from_numpy(values)


def counted(prompt: list[int], output: list[int]) -> Counts:
    counts = TokenCounts(prompt)
    counts.catch_up([*prompt, *output])
    return counts.arrays()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), ids.filter(len), ids, st.floats(0.1, 2.0), st.floats(-50, 50))
def test_bias_repetition_and_min_tokens_equal_transformers(
    seed: int, prompt: list[int], output: list[int], repetition: float, bias: float
) -> None:
    # From 1 on: transformers 5.17 rejects a bias of token 0.
    biased, forbidden = [1 + seed % (VOCAB_SIZE - 8), 8 + seed % (VOCAB_SIZE - 8)], [3, 11]
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token_id], bias] for token_id in biased]),
            RepetitionPenaltyLogitsProcessor(repetition),
            MinNewTokensLengthLogitsProcessor(len(prompt), len(output) + 1, forbidden),
        ]
    )
    theirs = processors(torch.tensor([[*prompt, *output]]), random_logits(seed))
    params = SamplingParams(
        logit_bias=tuple((token_id, bias) for token_id in biased), repetition_penalty=repetition
    )
    spec = SampleSpec(params, 0, forbidden, counted(prompt, output))
    ours = adjust_logits(random_logits(seed), [spec])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), ids.filter(len), ids, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_are_openais_formula(
    seed: int, prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    """mu[j] -= c[j] * frequency + (c[j] > 0) * presence, c counting the output alone."""
    wanted = random_logits(seed)[0].double()
    for token_id, count in Counter(output).items():
        wanted[token_id] -= count * frequency + presence
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    spec = SampleSpec(params, 0, counts=counted(prompt, output))
    ours = adjust_logits(random_logits(seed), [spec])[0]
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-6, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10_000),
    st.floats(0.2, 2.0),
    st.floats(0.0, 1.0),
    st.one_of(st.none(), st.integers(1, VOCAB_SIZE)),
    st.floats(0.05, 1.0),
)
def test_filters_keep_what_transformers_keep(
    seed: int, temperature: float, min_p: float, top_k: int | None, top_p: float
) -> None:
    logits = random_logits(seed)
    warpers = [TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)]
    kept = LogitsProcessorList(warpers)(torch.tensor([[0]]), logits).isfinite()[0]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    rows = [SampleSpec(params, token_key(seed, 0, i)) for i in range(300)]
    drawn = set(sample(logits.expand(300, -1), rows)[0].tolist())
    outside = [token_id for token_id in drawn if not kept[token_id]]
    # Rounding may move the one token at a filter's edge, and no other.
    assert len(outside) <= 1
    if kept.sum() == 1:
        assert drawn == {int(logits.argmax())} | set(outside)


def reference_probs(logits: np.ndarray, prompt: list[int], output: list[int]) -> np.ndarray:
    """Bias, penalties, a forbidden token, temperature 0.8, min-p 0.05, top-k 12, in this order."""
    mu = logits.astype(np.float64)
    mu[5] += 2.5
    for j in {*prompt, *output}:
        mu[j] = mu[j] / 1.3 if mu[j] > 0 else mu[j] * 1.3
    for j, count in Counter(output).items():
        mu[j] -= 0.4 * count + 0.6
    mu[9] = -np.inf
    probs = np.exp(mu / 0.8)
    probs /= probs.sum()
    probs[probs < 0.05 * probs.max()] = 0
    probs[np.argsort(-probs)[12:]] = 0
    return probs / probs.sum()


def all_at_once(prompt: list[int], output: list[int], key: int) -> SampleSpec:
    params = SamplingParams(
        temperature=0.8,
        top_k=12,
        min_p=0.05,
        logit_bias=((5, 2.5),),
        repetition_penalty=1.3,
        presence_penalty=0.6,
        frequency_penalty=0.4,
    )
    return SampleSpec(params, key, [9], counted(prompt, output))


GREEDY = SampleSpec(SamplingParams(temperature=0.0), 0)


def test_tokens_follow_the_adjusted_distribution() -> None:
    num_draws, prompt, output = 10_000, [1, 5, 8, 8], [2, 2, 20, 5, 2]
    logits = random_logits(4)
    row = all_at_once(prompt, output, 0)
    rows = [row._replace(key=token_key(3, 0, i)) for i in range(num_draws)]
    drawn = sample(logits.expand(num_draws, -1), rows)[0]
    counts = np.bincount(drawn.numpy(), minlength=VOCAB_SIZE)
    probs = reference_probs(logits[0].numpy(), prompt, output)
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * num_draws
    assert len(expected) > 3
    chi_square = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom)


def test_an_adjusted_row_does_not_depend_on_its_batch() -> None:
    logits = random_logits(8, rows=6)
    rows = [all_at_once([1, 2, 3 + i], [4] * i, 77 + i) if i % 2 else GREEDY for i in range(6)]
    ids, logprobs = sample(logits, rows)
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], [row])
        assert (int(alone[0]), float(alone[1])) == (int(ids[i]), float(logprobs[i]))


def test_greedy_takes_adjustments_but_no_filter() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 0.0]])
    params = SamplingParams(
        temperature=0.0,
        top_k=1,
        top_p=0.1,
        min_p=1.0,
        logit_bias=((3, 9.0),),
        frequency_penalty=1.5,
    )
    row = SampleSpec(params, 0, [3], counted([0], [0]))
    ids, logprobs = sample(logits, [row])
    assert ids.tolist() == [1]
    assert logprobs.item() == pytest.approx(float(logits.log_softmax(-1)[0, 1]), abs=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_distribution_have_no_logprob(bad: float) -> None:
    logits = random_logits(1, rows=2)
    logits[1, 7] = bad
    rows = [SampleSpec(SamplingParams(), 5), all_at_once([1], [2], 6)]
    logprobs = sample(logits, rows)[1]
    assert logprobs.isnan().tolist() == [False, True]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 20))
def test_top_logprobs_by_sorting(seed: int, k: int) -> None:
    values = np.random.default_rng(seed).integers(-3, 4, (2, VOCAB_SIZE)).astype(np.float32)
    logits = torch.from_numpy(np.where(values == 0, -0.0 * values, values))  # many ties, both zeros
    wanted = values - np.log(np.exp(values.astype(np.float64)).sum(-1, keepdims=True))
    top_ids, logprobs = top_logprobs(logits, k)
    for row in range(2):
        order = sorted(range(VOCAB_SIZE), key=lambda i: (-values[row, i], i))[:k]
        assert top_ids[row].tolist() == order
        np.testing.assert_allclose(logprobs[row], wanted[row, order], rtol=1e-5)
    own = token_logprobs(logits, torch.tensor([3, 59]))
    np.testing.assert_allclose(own, wanted[[0, 1], [3, 59]], rtol=1e-5)


@settings(max_examples=50, deadline=None)
@given(ids.filter(len), st.lists(ids, max_size=4))
def test_counts_grow_with_the_sequence(prompt: list[int], parts: list[list[int]]) -> None:
    counts, output = TokenCounts(prompt), []
    for part in [[], *parts]:
        output += part
        counts.catch_up([*prompt, *output])
        ids, numbers = (each.tolist() for each in counts.arrays())
        found = dict(zip(ids, numbers, strict=True))
        assert found == dict.fromkeys(prompt, 0) | Counter(output)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by numpy, in the interpreter
def test_the_gpu_sampler_says_nan_too_and_stays_in_the_vocabulary() -> None:
    pytest.importorskip("triton")
    from baton.kernels.sampling.sampling_triton import sample_unfiltered

    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = random_logits(1, rows=3).to(device)
    logits[0, 7], logits[1] = torch.nan, torch.nan
    token_ids = torch.zeros(3, dtype=torch.int64, device=device)
    logprobs = torch.zeros(3, device=device)
    temperatures = torch.tensor([1.0, 0.0, 0.0], device=device)
    keys = torch.tensor([1, 2, 3], device=device)
    sample_unfiltered(logits, temperatures, keys, token_ids, logprobs)
    assert logprobs.isnan().tolist() == [True, True, False]
    assert all(0 <= token_id < VOCAB_SIZE for token_id in token_ids.tolist())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.none() | st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1), min_size=1, max_size=4
    ),
    st.integers(0, 10_000),
)
def test_what_is_not_allowed_is_impossible_and_all_else_unchanged(
    rows: list[set[int] | None], seed: int
) -> None:
    logits = random_logits(seed, len(rows))
    adjusted = adjust_logits(
        logits.clone(),
        [SampleSpec(SamplingParams(), 0, allowed=None if r is None else mask_of(r)) for r in rows],
    )
    for row, allowed in enumerate(rows):
        for token_id in range(VOCAB_SIZE):
            is_kept = allowed is None or token_id in allowed
            expected = float(logits[row, token_id]) if is_kept else -np.inf
            assert float(adjusted[row, token_id]) == expected


def mask_of(allowed: set[int]) -> NDArray[np.int32]:
    """Bit i % 32 of word i // 32, by Python integers."""
    whole = sum(1 << token_id for token_id in allowed)
    words = [whole >> shift & 0xFFFFFFFF for shift in range(0, VOCAB_SIZE, 32)]
    return np.array(words, np.uint32).view(np.int32)


def test_tokens_behind_a_masks_end_are_not_allowed() -> None:
    logits = random_logits(3, 2)
    ids = [0, 31, 32, 40]
    short = allowed_only(ids)
    assert len(short) == 2 and np.array_equal(short, mask_of({*ids})[:2])
    rows = [short, mask_of({5, VOCAB_SIZE - 1})]
    adjusted = adjust_logits(logits, [SampleSpec(SamplingParams(), 0, allowed=r) for r in rows])
    left = [torch.isfinite(row).nonzero().flatten().tolist() for row in adjusted]
    assert left == [ids, [5, VOCAB_SIZE - 1]]
    assert np.array_equal(without(short, (40, VOCAB_SIZE - 1)), mask_of({0, 31, 32})[:2])


def test_a_mask_comes_behind_everything_else() -> None:
    """The mask is applied last: a bias cannot restore a masked token, and filters see what is
    left."""
    logits = torch.tensor([[5.0, 4.0, 3.0, 0.0]])
    params = SamplingParams(top_k=1, top_p=0.5, min_p=0.5, logit_bias=((0, 100.0),))
    for key in range(20):
        row = SampleSpec(params, key, allowed=np.array([0b1100], np.int32))
        ids, logprobs = sample(logits, [row])
        assert ids.tolist() == [2]
        assert logprobs.item() == pytest.approx(float(logits.log_softmax(-1)[0, 2]), abs=1e-6)


def test_what_filters_is_asked_for() -> None:
    """Rows that need only noise are not filtered."""
    logits = random_logits(8, 1)
    for name, one in SAMPLING.items():
        if (kind := one.field.schema.get("type")) in ("number", "integer"):
            params = replace(SamplingParams(), **{name: 0.5 if kind == "number" else 3})
            filter_scaled(filtered := logits.clone(), [params])
            assert needs_more_than_noise(params) == (not torch.equal(filtered, logits)), name


def test_candidates_are_the_likeliest_behind_all_changes() -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(5))
    params = SamplingParams(logit_bias=((7, 9.0),))
    specs = [
        SampleSpec(params, 0, forbidden_ids=(3,), num_candidates=6),
        SampleSpec(SamplingParams(), 0, num_candidates=6),
    ]
    ids, scores, logprobs = candidates(logits.clone(), specs, 6)
    changed = logits.clone()
    changed[0, 7] += 9.0
    changed[0, 3] = -math.inf
    wanted = changed.log_softmax(-1).topk(6)
    assert ids.tolist() == wanted.indices.tolist()
    torch.testing.assert_close(scores, wanted.values)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, ids))
