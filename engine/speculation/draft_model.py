"""Drafts by a small model, which has read all that the engine's own has.

Each draft is drawn as the token at its place will be, under the same key: a draft is right where
the two models' draws are equal. Penalties and grammars are not looked at.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from ...core.request.request import SamplingParams, token_key
from ...kernels.sampling.sample_spec import SampleSpec
from ..execution.batch import Drafter, SequenceSlice
from .proposer import Context


class DraftModelProposer:
    """A Proposer. Keeps nothing but `Sequence.drafted`; the KV lies in the sequences' blocks."""

    takes_steps = True

    def __init__(self, drafter: Drafter, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._drafter = drafter

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        """See Proposer."""
        drafts = self._drafter.draft([_slice(one) for one in contexts])
        for context, each in zip(contexts, drafts, strict=True):
            # The last of them is not computed: no other follows it.
            context.sequence.drafted = (len(context.token_ids), each[:-1])
        return [*drafts]


def num_drafted_tokens(context: Context) -> int:
    """How many of its tokens the draft model has KV of: all but the last at most."""
    sequence, token_ids = context.sequence, context.token_ids
    num_tokens, behind = sequence.drafted
    for token_id in behind:
        if num_tokens == len(token_ids) or token_ids[num_tokens] != token_id:
            break
        num_tokens += 1
    # Prompts are computed with the model's own, and so is what was preempted, or handed over.
    return min(max(num_tokens, sequence.num_prefill_tokens), len(token_ids) - 1)


def _slice(context: Context) -> SequenceSlice:
    sequence, start = context.sequence, num_drafted_tokens(context)
    request, first = sequence.request, len(sequence.token_ids)
    params = _drafting_params(request.sampling)
    specs = [
        SampleSpec(
            params,
            0 if params.is_greedy else token_key(params.seed, request.sample_index, position),
        )
        for position in range(first, first + context.max_drafts)
    ]
    return SequenceSlice(
        sequence.token_ids[start:], start, sequence.block_ids, None, draft_samples=specs
    )


@functools.lru_cache(1024)
def _drafting_params(params: SamplingParams) -> SamplingParams:
    """Without what needs more than logits, or gives more than a token."""
    return dataclasses.replace(params, logprobs=None)
