"""Drafts of n-grams against a naive search."""

from __future__ import annotations

import pytest
from fakes.speculation.drafting_runner import DraftingRunner
from hypothesis import given
from hypothesis import strategies as st

from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.scheduling.sequence import Sequence
from baton.engine.speculation.draft_model import DraftModelProposer
from baton.engine.speculation.ngram import NgramProposer
from baton.engine.speculation.proposer import Context
from baton.engine.speculation.proposers import make_proposer


def drafts(tokens: list[int], most: int, longest: int, shortest: int) -> list[int]:
    proposer = NgramProposer(most, longest, shortest)
    sequence = Sequence(Request("a", 0, tuple(tokens), SamplingParams()), 0, False, b"")
    (found,) = proposer.propose([Context(sequence, most)])
    return list(found)


def by_hand(tokens: list[int], most: int, longest: int, shortest: int) -> list[int]:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        ending = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == ending:
                repeated = [*tokens]
                for place in range(most):
                    repeated.append(repeated[end + place])
                return repeated[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 4),
)
def test_the_longest_ngram_at_its_last_place(
    tokens: list[int], most: int, shortest: int, more: int
) -> None:
    longest = shortest + more
    assert drafts(tokens, most, longest, shortest) == by_hand(tokens, most, longest, shortest)


def test_what_repeats_is_drafted_in_full() -> None:
    assert drafts([9, 1, 2, 1, 2], 5, 3, 2) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"method": "eagle", "num_speculative_tokens": 3}', '"method" must be'),
        ('{"method": "ngram"}', "'num_speculative_tokens' is missing"),
        ('{"num_speculative_tokens": 3}', "'method' is missing"),
        ('{"method": "ngram", "num_speculative_tokens": 17}', "[1, 16]"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "[1, 16]"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "draft": 1}', "'draft' is not known"),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, '
            '"prompt_lookup_min": 3}',
            "'prompt_lookup_min' must be an integer in [1, 2]",
        ),
        ('{"method": "draft_model", "num_speculative_tokens": 2}', "'model' is missing"),
        (
            '{"method": "draft_model", "num_speculative_tokens": 2, "model": 7}',
            "'model' must be a model directory",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 2, "model": "demo-draft"}',
            "'model' is not for",
        ),
        (
            '{"method": "draft_model", "num_speculative_tokens": 2, "model": "demo-draft", '
            '"prompt_lookup_max": 3}',
            "'prompt_lookup_max' is not for",
        ),
    ],
)
def test_what_cannot_be_used_is_named_at_the_start(text: str, named: str) -> None:
    with pytest.raises(StartupFailed) as refused:
        EngineConfig(speculative_config=text)
    assert named in refused.value.message
    assert "--speculative-config" in refused.value.message


def test_one_bound_of_the_lookup_is_both() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
    config = EngineConfig(speculative_config=text)
    assert config.speculation is not None and config.speculation.prompt_lookup_min == 4
    drafter = DraftingRunner(4, 4, rate=1.0)
    proposer = make_proposer(config.speculation, drafter)
    assert proposer is not None and proposer.max_drafts == 3 == config.max_drafts
    assert make_proposer(EngineConfig().speculation, drafter) is None


def test_a_draft_model_is_a_folder() -> None:
    text = '{"method": "draft_model", "num_speculative_tokens": 2, "model": "demo-draft"}'
    config = EngineConfig(speculative_config=text).speculation
    assert isinstance(make_proposer(config, DraftingRunner(4, 4, rate=1.0)), DraftModelProposer)
