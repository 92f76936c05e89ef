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
from ..execution.batch import SequenceSlice
from ..execution.runner_protocols import Drafter
from .proposer import Context


class DraftModelProposer:
    """A Proposer. Keeps nothing but `Sequence.drafted`; the KV lies in the sequences' blocks.

    `is_head`: a head's is there with each step, whether it drafts or not.
    """

    takes_steps = True

    def __init__(self, drafter: Drafter, max_drafts: int, *, is_head: bool = False) -> None:
        self.max_drafts, self.is_head = max_drafts, is_head
        self._drafter = drafter

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        """See Proposer."""
        drafts = self._drafter.draft([_slice(one) for one in contexts])
        if not self.is_head:
            for context, each in zip(contexts, drafts, strict=True):
                # The last of them is not computed: no other follows it.
                context.sequence.drafted = (len(context.token_ids), each[:-1])
        return [*drafts]


def _slice(context: Context) -> SequenceSlice:
    sequence = context.sequence
    request, first = sequence.request, len(sequence.token_ids)
    start = min(sequence.num_drafted_tokens, first - 1)  # the last one is read again
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
