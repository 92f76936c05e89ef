"""Beams against the same search over the whole vocabulary, and against all possible sequences."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from effort import examples
from fakes.beams import best_of_all, search
from fakes.runner import next_logprobs
from hypothesis import given
from hypothesis import strategies as st

from baton.core.request.request import FinishReason
from baton.engine.beams.beam_group import BeamGroup, BeamRules, Hypothesis, num_candidates
from baton.engine.execution.batch import SampledToken
from baton.kernels.sampling.top_logprobs import Candidate

VOCAB_SIZE = 12
EOS = 3


def sampled(logprobs: Sequence[float], k: int) -> SampledToken:
    best = sorted(range(len(logprobs)), key=lambda i: (-logprobs[i], i))[:k]
    candidates = tuple(Candidate(i, logprobs[i], logprobs[i]) for i in best)
    return SampledToken(best[0], logprobs[best[0]], candidates=candidates)


def run(rules: BeamRules, seed: int, vocab_size: int = VOCAB_SIZE) -> list[Hypothesis]:
    """Run a whole search; the prompt `seed` stands for a model."""
    group, k = BeamGroup(rules), num_candidates(rules.width, len(rules.stop_ids))
    beams: list[list[int]] = [[]]
    while beams:
        found = [sampled(next_logprobs([seed, *one], vocab_size), k) for one in beams]
        beams = [[*beams[new.parent], new.token_id] for new in group.advance(found)]
    return group.best(rules.width)


def check(rules: BeamRules, seed: int) -> None:
    found = run(rules, seed)
    expected = search(
        lambda tokens: next_logprobs([seed, *tokens], VOCAB_SIZE),
        rules.width,
        rules.max_tokens,
        rules.stop_ids,
        length_penalty=rules.length_penalty,
        early_stopping=rules.early_stopping,
        num_groups=rules.num_groups,
        diversity_penalty=rules.diversity_penalty,
    )
    assert [one.tokens()[0] for one in found] == [tokens for _, tokens in expected]
    assert [one.score for one in found] == pytest.approx([score for score, _ in expected])
    for one in found:
        token_ids, logprobs = one.tokens()
        is_stop = token_ids[-1] in rules.stop_ids
        assert one.finish_reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
        assert len(logprobs) == len(token_ids)


@examples(60, 400)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 6),
    max_tokens=st.integers(1, 9),
    stop_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=3),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    early_stopping=st.sampled_from(["true", "false", "never"]),
)
def test_the_beams_are_those_of_a_search_over_all_tokens(
    seed: int,
    width: int,
    max_tokens: int,
    stop_ids: frozenset[int],
    length_penalty: float,
    early_stopping: str,
) -> None:
    check(BeamRules(width, max_tokens, stop_ids, length_penalty, early_stopping), seed)


@examples(60, 400)
@given(
    seed=st.integers(0, 10**6),
    num_groups=st.integers(2, 4),
    size=st.integers(1, 3),
    penalty=st.sampled_from([0.1, 0.5, 1.7, 100.0]),
    max_tokens=st.integers(1, 7),
    early_stopping=st.sampled_from(["true", "false", "never"]),
)
def test_groups_are_those_of_a_search_over_all_tokens(
    seed: int, num_groups: int, size: int, penalty: float, max_tokens: int, early_stopping: str
) -> None:
    width, stop_ids = num_groups * size, frozenset({EOS})
    check(
        BeamRules(width, max_tokens, stop_ids, 1.0, early_stopping, num_groups, penalty),
        seed,
    )


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beams_enough_for_all_find_the_best_of_all_sequences(length_penalty: float) -> None:
    vocab_size, max_tokens, stop_ids = 4, 4, frozenset({EOS})
    for seed in random.Random(0).sample(range(10**6), 5):
        rules = BeamRules(
            vocab_size**max_tokens, max_tokens, stop_ids, length_penalty, early_stopping="never"
        )
        expected = best_of_all(
            lambda tokens, seed=seed: next_logprobs([seed, *tokens], vocab_size),  # type: ignore[misc]
            vocab_size,
            max_tokens,
            stop_ids,
            length_penalty,
        )
        found = run(rules, seed, vocab_size)
        assert [one.score for one in found] == pytest.approx([score for score, _ in expected])
        assert {one.tokens()[0] for one in found} == {tokens for _, tokens in expected}


def test_a_strong_penalty_keeps_the_groups_apart() -> None:
    group = BeamGroup(BeamRules(4, 9, num_groups=4, diversity_penalty=100.0))
    first = group.advance([sampled(next_logprobs([1], VOCAB_SIZE), 4)])
    assert len({beam.token_id for beam in first}) == 4
    assert [beam.parent for beam in first] == [0, 0, 0, 0]


def test_a_token_that_must_not_come_is_no_candidate() -> None:
    group = BeamGroup(BeamRules(2, 9))
    (beam,) = group.advance(
        [SampledToken(1, 0.0, candidates=(Candidate(1, 0.0, -3.0), Candidate(2, -float("inf"), 0)))]
    )
    assert beam.token_id == 1 and beam.last.logprobs.logprob == -3.0
