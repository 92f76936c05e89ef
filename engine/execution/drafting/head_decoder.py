"""A draft head as a StepModel: its input tokens are the ones after each position, and the states
that it reads are in a buffer, where its own states replace them. Knows no step."""

from __future__ import annotations

from torch import Tensor

from ....kernels.attention.attention import AttentionBackend
from ...model.decoder import Decoder
from ...model.draft_head import Head
from ...model.stages import LayerRange


class HeadDecoder:
    """A StepModel for `head`, on the device and ranks of `model`. `states` [most tokens, hidden]: a
    row for each token of the step. Without `has_logits` it acts as a pipeline stage that is not the
    last: its steps sample nothing."""

    has_whole_logits = True
    kept: Tensor | None = None

    def __init__(self, head: Head, states: Tensor, model: Decoder, *, has_logits: bool) -> None:
        self._head, self._states = head, states
        self.device, self.dtype = model.device, model.dtype
        self.communicator, self.vocab_size = model.communicator, model.vocab_size
        self.range = LayerRange(0, 1, 1 if has_logits else 2)

    @property
    def lm_head(self) -> HeadDecoder:
        return self

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionBackend
    ) -> Tensor:
        states = self._states[: len(token_ids)]
        behind = self._head.forward(token_ids, states, positions, attention)
        if behind is not states:
            states.copy_(behind)
        return states

    def project(self, x: Tensor) -> Tensor:
        return self._head.logits(x)

    project_part = project  # a head computes whole logits on each rank

    def gather(self, parts: Tensor) -> Tensor:
        return parts
