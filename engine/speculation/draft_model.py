"""Drafts by a small model whose KV is of the same tokens as that of the target model.

Each draft is sampled with the key of its position, as the target's token is: a draft is accepted if
both models sample the same token. Penalties and grammars are ignored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from ...core.request.request import token_key
from ...core.request.sampling_params import SamplingParams
from ...kernels.sampling.sample_spec import SampleSpec
from ..execution.batch import SequenceSlice
from ..execution.runner_protocols import Drafter
from .proposer import Context


class DraftModelProposer:
    """A Proposer. Its only state is `Sequence.drafted`; the KV is in the sequences' blocks.

    `is_head`: of a draft head, whose KV each step computes, with or without drafts.
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
                # The last draft's KV is not computed, as no draft follows it.
                context.sequence.drafted = (len(context.token_ids), each[:-1])
        return [*drafts]


def _slice(context: Context) -> SequenceSlice:
    sequence = context.sequence
    request, first = sequence.request, len(sequence.token_ids)
    start = min(sequence.num_drafted_tokens, first - 1)  # the last token is computed again
    params = _drafting_params(request.sampling)
    specs = [
        SampleSpec(
            params,
            token_key(params.seed, request.sample_index, position) if params.temperature > 0 else 0,
        )
        for position in range(first, first + context.max_drafts)
    ]
    return SequenceSlice(
        sequence.token_ids[start:], start, sequence.block_ids, None, draft_samples=specs
    )


@functools.lru_cache(1024)
def _drafting_params(params: SamplingParams) -> SamplingParams:
    """The parameters without alternatives, which drafts do not return."""
    return dataclasses.replace(params, logprobs=None)
