"""Steps of a draft model: prompts beside the engine's steps, and drafts between two of them.

    tokens     ... a  b  c | d1  d2  d3      c was the last one known, the rest drafts
    its KV     ... a  b  c   d1  d2          d3 was drawn, and not computed
    e follows d2:  next drafts begin with e            [ e ]  -> d1' -> d2' -> d3'
    e follows d3:  and d3 is computed with it      [ d3, e ]  -> d1' -> d2' -> d3'

Prompts are computed in the step that the engine computes them in. What the engine decodes without
drafts, the draft model computes when it is to draft again, all at once; so it does where cached
blocks lack its KV, with the prompt behind them. On a GPU the steps of one call are launched behind
each other, and a token is known to the host when all are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from ....core.errors import EngineFailed
from ....core.request.sampling_params import SamplingParams
from ....kernels.sampling.sample_spec import SampleSpec
from ..batch import SequenceSlice
from ..cpu_steps import CpuSteps
from ..runner_protocols import LaunchedStep

if TYPE_CHECKING:
    from ..gpu.gpu_steps import GpuSteps  # needs Triton

_NOBODYS = SampleSpec(SamplingParams(temperature=0.0), key=0)  # of a token that is known
MOST_ROWS = 2  # of a sequence in the first step of its drafts


class DraftSteps:
    """`steps` of the draft model, at most `most_tokens` in one: a Drafter."""

    def __init__(self, steps: CpuSteps | GpuSteps, most_tokens: int) -> None:
        self._steps, self._most_tokens = steps, most_tokens

    def compute_prompts(self, batch: Sequence[SequenceSlice]) -> LaunchedStep | None:
        """Launch its part of a step, in front of the engine's: the KV of prompts, if it has any."""
        prompts = [
            SequenceSlice(piece.token_ids, piece.start, piece.block_table, None)
            for piece in batch
            if piece.is_prompt
        ]
        return self._steps.launch(prompts) if prompts else None

    def draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        """See Drafter."""
        try:
            with torch.inference_mode():
                for late in self._late(batch):
                    self._steps.launch(late)
                return self._draft(batch)
        except RuntimeError as error:  # torch's: out of memory, device lost
            raise EngineFailed(f"drafting failed: {error}") from error

    def _draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in batch]
        launched: list[tuple[list[int], LaunchedStep]] = []

        def take(drafting: list[int], step: LaunchedStep) -> None:
            for index, token in zip(drafting, step.collect(), strict=True):
                assert token is not None
                drafts[index].append(token.token_id)

        places: dict[int, int] = {}  # of each slice's token among those of the step before
        at: Sequence[int]
        for depth in range(max(len(piece.draft_samples) for piece in batch)):
            drafting = [i for i, piece in enumerate(batch) if len(piece.draft_samples) > depth]
            if depth:
                pieces = [_next(batch[i], depth, drafts[i], places[i]) for i in drafting]
                step = self._go_on(pieces, [places[i] for i in drafting])
                at = range(len(pieces))
            else:
                step, at = self._begin([batch[i] for i in drafting])
            launched.append((drafting, step))
            if not self._steps.runs_ahead:
                take(*launched.pop())
            places = dict(zip(drafting, at, strict=True))
        for each in launched:
            take(*each)
        return drafts

    def _begin(self, batch: Sequence[SequenceSlice]) -> tuple[LaunchedStep, Sequence[int]]:
        """The step of the first drafts, and where each of them is among its tokens."""
        pieces = [_first(piece) for piece in batch]
        ends = accumulate(len(piece.draft_samples) + 1 for piece in pieces)
        return self._steps.launch(pieces), [end - 1 for end in ends]

    def _go_on(self, pieces: list[SequenceSlice], rows: Sequence[int]) -> LaunchedStep:
        """The step of the next drafts, behind these rows of the one before."""
        return self._steps.launch(pieces)

    def _late(self, batch: Sequence[SequenceSlice]) -> Iterator[list[SequenceSlice]]:
        """What is missing in front of the first steps' rows, as steps of their own."""
        pieces, room = list[SequenceSlice](), self._most_tokens
        for token_ids, start, table, *_ in batch:
            first, end = 0, len(token_ids) - MOST_ROWS
            while first < end:
                num_tokens = min(room, end - first)
                tokens = token_ids[first : first + num_tokens]
                pieces.append(SequenceSlice(tokens, start + first, table, None))
                first, room = first + num_tokens, room - num_tokens
                if not room:
                    yield pieces
                    pieces, room = [], self._most_tokens
        if pieces:
            yield pieces


def _first(piece: SequenceSlice) -> SequenceSlice:
    """Its last tokens, as a decode with a draft in front of the one that is drawn."""
    tokens = piece.token_ids[-MOST_ROWS:]
    start = piece.start + len(piece.token_ids) - len(tokens)
    known = (_NOBODYS,) * (len(tokens) - 1)
    return SequenceSlice(
        tokens, start, piece.block_table, piece.draft_samples[0], draft_samples=known
    )


def _next(piece: SequenceSlice, depth: int, drafts: Sequence[int], place: int) -> SequenceSlice:
    """The draft before, which the host may not know yet: it is the last step's at `place`."""
    follows = place if len(drafts) < depth else None
    tokens = [0 if follows is not None else drafts[-1]]
    start = piece.start + len(piece.token_ids) + depth - 1
    return SequenceSlice(tokens, start, piece.block_table, piece.draft_samples[depth], follows)
