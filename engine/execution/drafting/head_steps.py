"""Steps of a draft head: after each step of the model, and drafts between two of them.

    tokens of a step         a   b   c      sampled after them: d
    the head reads         a,b b,c c,d     each with the model's state of the first
    its KV is at             a   b   c

So each step writes the head's KV for all of its tokens, prompts and accepted drafts alike, and a
hand-off transfers complete blocks. The first draft of a sequence is sampled from the head's state
in the last step; a sequence that was not in it, as after a hand-off, has no drafts until its next
step. On a GPU the head's part is launched after the sampler and reads its tokens on the device.

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
from ...model.draft_head import Head
from ..batch import DecodeColumns, SequenceSlice, StepBatch
from ..cpu_steps import CpuSteps
from ..runner_protocols import LaunchedStep
from .draft_steps import DraftSteps
from .head_decoder import HeadDecoder

if TYPE_CHECKING:
    from ..gpu.gpu_steps import GpuSteps


class HeadSteps(DraftSteps):
    """A Drafter. Two kinds of steps run the head over the states: draft steps, and steps after each
    step of the model, which read the tokens that it samples and sample nothing."""

    def __init__(
        self,
        model: Decoder,
        head: Head,
        block_size: int,
        most_tokens: int,
        new_behind: Callable[[HeadDecoder], CpuSteps | GpuSteps],
        new_steps: Callable[[HeadDecoder], CpuSteps | GpuSteps],
    ) -> None:
        """`most_tokens`: the maximum of a step of `model`, padding included. `new_behind` makes the
        steps after the model's steps, `new_steps` the draft steps."""
        self._states = states = _states(model, head, most_tokens)
        behind, whole = (HeadDecoder(head, states, model, has_logits=on) for on in (False, True))
        self._behind = new_behind(behind)
        super().__init__(new_steps(whole), most_tokens)
        self._head, self._block_size = head, block_size
        self._slots: Sequence[int] = ()  # of the last step's rows
        self._tokens: Sequence[int] = ()  # of the last step's rows: indices in the step
        self._sampled: tuple[Tensor, Sequence[int]] | None = None
        self._rows: dict[tuple[int, int], int] = {}  # of states, by slot and the token after it

    def capture_graphs(self) -> None:
        for steps in (self._behind, self._steps):
            assert not isinstance(steps, CpuSteps), "a CPU has no graphs"
            steps.capture_graphs()

    def follow(
        self, batch: StepBatch, features: Tensor, sampled: Tensor, at: Sequence[int]
    ) -> None:
        """Run the head after a step of the model over `batch` that kept `features`; the tokens of
        its rows are in `sampled` at the places `at`."""
        known = None if self._behind.runs_ahead else sampled.tolist()
        pieces, first = list[SequenceSlice](), len(batch.decodes)
        for piece in batch.others:
            # If the next token is unknown, the position's result is not read: the position is
            # computed again, or was the last.
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
        """See Drafter: no drafts for a sequence that was not in the last step."""
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
        """Fill `_rows` with the rows of the last step, which has completed."""
        if self._sampled is None:
            return
        sampled, at = self._sampled
        token_ids = sampled.tolist()
        found = zip(self._slots, at, self._tokens, strict=True)
        self._rows = {(slot, token_ids[place]): row for slot, place, row in found}
        self._sampled = None

    def _row_of(self, piece: SequenceSlice) -> int | None:
        """The row of the state before the slice's last token; None if not in the last step."""
        position = piece.start + len(piece.token_ids) - 2
        block_id = piece.block_table[position // self._block_size]
        slot = block_id * self._block_size + position % self._block_size
        return self._rows.get((slot, piece.token_ids[-1]))

    def _begin(self, batch: Sequence[SequenceSlice]) -> tuple[LaunchedStep, Sequence[int]]:
        """See DraftSteps; samples from the states of the last step."""
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
        """Copy the states of `rows` to the first rows."""
        index = upload(np.array(rows, np.int64), self._states.device)
        self._states[: len(rows)].copy_(self._states.index_select(0, index))


def _states(model: Decoder, head: Head, most_tokens: int) -> Tensor:
    """Allocate the states, and make `model` keep the features that they are computed from. Both
    buffers keep their addresses: CUDA graphs write to them."""
    model.kept = None  # frees the old one first: memory may not suffice for both
    width = max(1, len(model.kept_layers)) * model.hidden_size
    model.kept = torch.zeros(most_tokens, width, dtype=model.dtype, device=model.device)
    shape = (most_tokens, head.hidden_size)
    return torch.zeros(shape, dtype=model.dtype, device=model.device)


def _columns_behind(
    decodes: DecodeColumns, at: Sequence[int], known: Sequence[int] | None
) -> DecodeColumns:
    """The same decodes with the tokens that they sampled; if not `known`, each awaits the token at
    its place of `at`."""
    n = len(decodes)
    places = np.array(at[:n], np.int64)
    slots = [None] * n
    if known is None:
        return replace(decodes, token_ids=places, follows=places, adapter_slots=slots)
    token_ids, follows = np.array(known, np.int64)[places], np.full(n, -1)
    return replace(decodes, token_ids=token_ids, follows=follows, adapter_slots=slots)


def _last(piece: SequenceSlice) -> SequenceSlice:
    """The slice's last token, at the position before it, where the head has its KV."""
    start = piece.start + len(piece.token_ids) - 2
    return piece._replace(token_ids=piece.token_ids[-1:], start=start)
