"""Steps of a draft head: behind each step of the model, and drafts between two of them.

    tokens of a step         a   b   c      sampled behind them: d
    the head reads         a,b b,c c,d     each with the model's state of the first
    its KV lies at           a   b   c

So a step leaves the head's KV of every token that it computes, prompts and accepted drafts alike,
and blocks go over whole. The first draft of a sequence is made of the state that the last step
left; what was not in it, as after a hand-off, has no drafts until its next. On a GPU the head's
part is launched behind the sampling, whose tokens it finds on the device.

    states   [ of the last step, by token ]  ─ rows chosen ─►  [ of each sequence that drafts ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ....kernels.upload import upload
from ...model.decoder import Decoder
from ...model.draft_head import DraftHead
from ..batch import DecodeColumns, SequenceSlice, StepBatch
from ..cpu_steps import CpuSteps
from ..runner_protocols import LaunchedStep
from .draft_steps import DraftSteps
from .head_decoder import HeadDecoder

if TYPE_CHECKING:
    from ..gpu.gpu_steps import GpuSteps


class HeadSteps(DraftSteps):
    """A Drafter. Its steps and those behind the model's run the head over the states, the latter
    without sampling: they await what the model's steps sample."""

    def __init__(
        self,
        model: Decoder,
        head: DraftHead,
        block_size: int,
        most_tokens: int,
        new_behind: Callable[[HeadDecoder], CpuSteps | GpuSteps],
        new_steps: Callable[[HeadDecoder], CpuSteps | GpuSteps],
    ) -> None:
        """Beside `model`, whose steps have at most `most_tokens`, with padding."""
        self._states = states = _states(model, head, most_tokens)
        behind, whole = (HeadDecoder(head, states, model, has_logits=on) for on in (False, True))
        self._behind = new_behind(behind)
        super().__init__(new_steps(whole), most_tokens)
        self._head, self._block_size = head, block_size
        self._slots: Sequence[int] = ()  # of the last step's rows
        self._tokens: Sequence[int] = ()  # of the last step
        self._sampled: tuple[Tensor, Sequence[int]] | None = None
        self._rows: dict[tuple[int, int], int] = {}  # of states, by slot and the token behind it

    def capture_graphs(self) -> None:
        """See GpuSteps."""
        self._behind.capture_graphs()
        self._steps.capture_graphs()

    def follow(
        self, batch: StepBatch, features: Tensor, sampled: Tensor, at: Sequence[int]
    ) -> None:
        """Behind a step of the model over `batch` that kept `features`; the tokens of its rows lie
        in `sampled` `at` these places."""
        known = None if self._behind.runs_ahead else sampled.tolist()
        pieces, first = list[SequenceSlice](), len(batch.decodes)
        for piece in batch.others:
            # What is known of none is read by nobody: it is computed once more, or was the last.
            token_ids = [*piece.token_ids[1:], piece.next_token_id or 0]
            follows = None
            if piece.sample is not None:
                end = first + 1 + len(piece.draft_samples)
                if known is None:
                    follows = at[first]
                else:
                    token_ids[first - end :] = [known[place] for place in at[first:end]]
                first = end
            pieces.append(piece._replace(token_ids=token_ids, follows=follows, adapter_slot=None))
        behind = StepBatch(_columns_behind(batch.decodes, at, known), pieces)
        arrays = behind.flatten(self._block_size)
        num_tokens = arrays.shape[1]
        self._states[:num_tokens].copy_(self._head.fuse(features[:num_tokens]))
        self._behind.launch(behind)
        self._tokens = batch.logits_indices
        self._slots = arrays[2, self._tokens].tolist()
        self._sampled = (sampled, at)

    def draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        """See Drafter: none for a sequence that was not in the last step."""
        self._know_rows()
        drafts: list[list[int]] = [[] for _ in batch]
        found = [self._row_of(piece) for piece in batch]
        drafting = [index for index, row in enumerate(found) if row is not None]
        if drafting:
            self._first_rows = [row for row in found if row is not None]
            proposed = super().draft([_last(batch[index]) for index in drafting])
            for index, each in zip(drafting, proposed, strict=True):
                drafts[index] = each
        return drafts

    def _know_rows(self) -> None:
        """Which token was sampled at each row of the last step, which has completed."""
        if self._sampled is None:
            return
        sampled, at = self._sampled
        token_ids = sampled.tolist()
        found = zip(self._slots, at, self._tokens, strict=True)
        self._rows = {(slot, token_ids[place]): row for slot, place, row in found}
        self._sampled = None

    def _row_of(self, piece: SequenceSlice) -> int | None:
        """Where the last step left the state in front of its last token."""
        position = piece.start + len(piece.token_ids) - 2
        block_id = piece.block_table[position // self._block_size]
        slot = block_id * self._block_size + position % self._block_size
        return self._rows.get((slot, piece.token_ids[-1]))

    def _begin(self, batch: Sequence[SequenceSlice]) -> tuple[LaunchedStep, Sequence[int]]:
        """Of states that are there already."""
        self._choose(self._first_rows)
        self._rows = {}  # their states are overwritten
        pieces = [
            piece._replace(sample=piece.draft_samples[0], draft_samples=()) for piece in batch
        ]
        step = self._steps.sample_states(pieces, self._states[: len(pieces)])
        return step, range(len(pieces))

    def _go_on(self, pieces: list[SequenceSlice], rows: Sequence[int]) -> LaunchedStep:
        if [*rows] != [*range(len(rows))]:
            self._choose(rows)
        return self._steps.launch(pieces)

    def _choose(self, rows: Sequence[int]) -> None:
        """Let the first states be these."""
        index = upload(np.array(rows, np.int64), self._states.device)
        self._states[: len(rows)].copy_(self._states.index_select(0, index))


def _states(model: Decoder, head: DraftHead, most_tokens: int) -> Tensor:
    """Room for them; `model` keeps what they are made of."""
    model.keep(most_tokens)
    shape = (most_tokens, head.hidden_size)
    return torch.zeros(shape, dtype=model.dtype, device=model.device)


def _columns_behind(
    decodes: DecodeColumns, at: Sequence[int], known: Sequence[int] | None
) -> DecodeColumns:
    """The same with the token that each has sampled, or awaits `at` its place."""
    n = len(decodes)
    places = np.array(at[:n], np.int64)
    slots = [None] * n
    if known is None:
        return replace(decodes, token_ids=places, follows=places, adapter_slots=slots)
    token_ids, follows = np.array(known, np.int64)[places], np.full(n, -1)
    return replace(decodes, token_ids=token_ids, follows=follows, adapter_slots=slots)


def _last(piece: SequenceSlice) -> SequenceSlice:
    """Its last token, at the position in front: there the head has its KV."""
    start = piece.start + len(piece.token_ids) - 2
    return piece._replace(token_ids=piece.token_ids[-1:], start=start)
