"""Steps of a draft model: prompts beside the engine's steps, and drafts between two of them.

    tokens     ... a  b  c | d1  d2  d3      c was the last known token, the rest are drafts
    its KV     ... a  b  c   d1  d2          d3 was sampled, its KV not computed
    e follows d2:  the next drafts begin with e        [ e ]  -> d1' -> d2' -> d3'
    e follows d3:  d3 is computed together with e  [ d3, e ]  -> d1' -> d2' -> d3'

Prompts are computed along with the engine's step for them. Tokens that the engine decodes without
drafts are computed all at once when the draft model drafts next; likewise cached blocks that lack
its KV, and the prompt after them. On a GPU the steps of one `draft` are launched without waiting,
and the host reads their tokens when all have completed.
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

_NOBODYS = SampleSpec(SamplingParams(temperature=0.0), key=0)  # for a known token: not used
MOST_ROWS = 2  # tokens of a sequence in the first step of its drafts


class DraftSteps:
    """A Drafter that runs `steps` of the draft model, of at most `most_tokens` tokens each."""

    def __init__(self, steps: CpuSteps | GpuSteps, most_tokens: int) -> None:
        self._steps, self._most_tokens = steps, most_tokens

    def compute_prompts(self, batch: Sequence[SequenceSlice]) -> LaunchedStep | None:
        """Launch the draft model's part of a step, before the engine's: it computes the KV of the
        prompts in `batch`. None if there are none."""
        prompts = [
            SequenceSlice(piece.token_ids, piece.start, piece.block_table, None)
            for piece in batch
            if piece.is_prompt
        ]
        return self._steps.launch(prompts) if prompts else None

    def draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
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

        places: dict[int, int] = {}  # by slice: its token's index in the step before
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
        """Launch the step of the first drafts; returns it and each draft's index in its samples."""
        pieces = [_first(piece) for piece in batch]
        ends = accumulate(len(piece.draft_samples) + 1 for piece in pieces)
        return self._steps.launch(pieces), [end - 1 for end in ends]

    def _go_on(self, pieces: list[SequenceSlice], rows: Sequence[int]) -> LaunchedStep:
        """Launch the step of the next drafts, which follow these rows of the step before."""
        return self._steps.launch(pieces)

    def _late(self, batch: Sequence[SequenceSlice]) -> Iterator[list[SequenceSlice]]:
        """Batches of the tokens before the rows of `_begin` whose KV is missing."""
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
    """A decode of the slice's last MOST_ROWS tokens, all but the first as drafts; its `sample` is
    that of the first new draft."""
    tokens = piece.token_ids[-MOST_ROWS:]
    start = piece.start + len(piece.token_ids) - len(tokens)
    known = (_NOBODYS,) * (len(tokens) - 1)
    return SequenceSlice(
        tokens, start, piece.block_table, piece.draft_samples[0], draft_samples=known
    )


def _next(piece: SequenceSlice, depth: int, drafts: Sequence[int], place: int) -> SequenceSlice:
    """A decode of the previous draft. If the host does not know it yet, it is the sample at `place`
    of the last step."""
    follows = place if len(drafts) < depth else None
    tokens = [0 if follows is not None else drafts[-1]]
    start = piece.start + len(piece.token_ids) + depth - 1
    return SequenceSlice(tokens, start, piece.block_table, piece.draft_samples[depth], follows)
