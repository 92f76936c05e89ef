"""Steps of a draft head: behind each step of the model, and drafts between two of them.

    tokens of a step         a   b   c      sampled behind them: d
    the head reads          a,b b,c c,d     each with the model's state of the first
    its KV lies at           a   b   c

So a step leaves the head's KV of every token that it computes, prompts and accepted drafts alike,
and blocks go over whole. The first draft of a sequence is made of the state that the last step
left; what was not in it, as after a hand-off, has no drafts until its next. CPUs only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....core.errors import EngineFailed
from ....kernels.attention.attention import AttentionBackend
from ....kernels.sampling.sample_spec import SampleSpec
from ....kernels.sampling.sampling import sample
from ...model.draft_head import DraftHead
from ..batch import SequenceSlice
from ..step_parts import Int64s, SampledRows, flatten, metadata_of, padded


class HeadSteps:
    """A Drafter."""

    def __init__(self, head: DraftHead, attention: AttentionBackend, block_size: int) -> None:
        self._head, self._attention, self._block_size = head, attention, block_size
        self._states: Tensor | None = None  # [tokens, hidden] of the last step
        self._rows: dict[tuple[int, int], int] = {}  # of these, by slot and the token behind it

    def follow(
        self,
        batch: Sequence[SequenceSlice],
        features: Tensor,
        rows: SampledRows,
        token_ids: Sequence[int],
    ) -> None:
        """Behind a step of the model over `batch`, which is `padded`, kept `features` and sampled
        `token_ids` at `rows`."""
        following = np.zeros(len(features), np.int64)
        first = 0
        for piece in batch:
            end = first + piece.num_scheduled_tokens
            following[first : end - 1] = piece.token_ids[1:]
            # What is known of none is read by nobody: it is computed once more, or was the last.
            following[end - 1] = piece.next_token_id or 0
            first = end
        following[rows.tokens] = token_ids
        states = self._head.fuse(features)
        self._states, slots = self._forward(batch, following, states)
        found = zip(slots[rows.tokens].tolist(), token_ids, rows.tokens, strict=True)
        self._rows = {(slot, token_id): row for slot, token_id, row in found}

    def draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        """See `batch.Drafter`: none for a sequence that was not in the last step."""
        try:
            with torch.inference_mode():
                return self._draft(batch)
        except RuntimeError as error:  # torch's: out of memory
            raise EngineFailed(f"drafting failed: {error}") from error

    def _draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in batch]
        found = [self._row_of(piece) for piece in batch]
        drafting = [index for index, row in enumerate(found) if row is not None]
        states, depth = self._states, 0
        rows = [row for row in found if row is not None]
        while drafting:
            assert states is not None
            states = states.index_select(0, torch.tensor(rows))
            specs = [batch[index].draft_samples[depth] for index in drafting]
            for index, token_id in zip(drafting, self._sampled(states, specs), strict=True):
                drafts[index].append(token_id)
            depth += 1
            longer = [len(batch[index].draft_samples) > depth for index in drafting]
            rows = [row for row, goes_on in enumerate(longer) if goes_on]
            if not rows:
                break
            drafting = [drafting[row] for row in rows]
            pieces = [_next(batch[index], depth, drafts[index][-1]) for index in drafting]
            following = np.array([drafts[index][-1] for index in drafting])
            if len(rows) == 1:
                rows, following = rows * 2, following.repeat(2)
            states, _ = self._forward(padded(pieces), following, states[rows])
            rows = list(range(len(pieces)))
        return drafts

    def _row_of(self, piece: SequenceSlice) -> int | None:
        """Where the last step left the state in front of its last token."""
        position = piece.start + len(piece.token_ids) - 2
        block_id = piece.block_table[position // self._block_size]
        slot = block_id * self._block_size + position % self._block_size
        return self._rows.get((slot, piece.token_ids[-1]))

    def _forward(
        self, batch: Sequence[SequenceSlice], following: Int64s, states: Tensor
    ) -> tuple[Tensor, Int64s]:
        """The states behind these, and the slots of all."""
        _, positions, slots = flatten(batch, self._block_size)
        self._attention.plan(metadata_of(batch, torch.from_numpy(slots)))
        behind = self._head.forward(
            torch.from_numpy(following), states, torch.from_numpy(positions), self._attention
        )
        return behind, slots

    def _sampled(self, states: Tensor, specs: Sequence[SampleSpec]) -> list[int]:
        alone = len(states) == 1
        logits = self._head.logits(states.expand(2, -1).contiguous() if alone else states)
        token_ids, _ = sample(logits[:1] if alone else logits, specs)
        found: list[int] = token_ids.tolist()
        return found


def _next(piece: SequenceSlice, depth: int, draft: int) -> SequenceSlice:
    """Position of the token in front of the draft that was made last."""
    start = piece.start + len(piece.token_ids) - 2 + depth
    return SequenceSlice([draft], start, piece.block_table, None)
