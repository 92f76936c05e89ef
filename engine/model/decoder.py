"""The decoder of Llama and its kin: RMSNorm, rotary GQA attention, SwiGLU, over flat batches.

Owns the order of operations; construction/decoder.py builds the modules. An AttentionBackend
hides attention and the KV pool. With tensor parallelism each rank has some of the heads, and the
norms add up the ranks' outputs of attention and MLP. A pipeline stage has some of the layers and
sends the residual stream to the next stage. Knows no request, no block and no weight name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kernels.attention.attention import AttentionBackend
from ...kernels.experts.experts import ExpertLoads
from ...kernels.kv.kv_blocks import HeadNorms
from ...kernels.products.weights import Activations, Fp8Weight, Summand
from .communicator import Communicator
from .experts import Experts
from .layers import MLP, Embedding, GatedLinear, Linear, RMSNorm, RotaryEmbedding, RowLinear
from .stages import LayerRange
from .weights.targets import WeightTarget


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with its projections, and norms of q and k if the model has them.

    `layer`: index in the KV pool. `spread`: indices of the QKV heads in the pool's order, where the
    pool stores several copies of each of this rank's KV heads.
    """

    layer: int
    head_dim: int
    qkv: Linear
    out: RowLinear
    norms: HeadNorms | None
    spread: Tensor | None

    def __call__(
        self, x: Activations, rope: tuple[Tensor, Tensor], attention: AttentionBackend
    ) -> Summand:
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)  # [tokens, heads + 2 kv_heads, dim]
        if self.spread is not None:
            qkv = qkv.index_select(1, self.spread)
        return self.out(attention.run(self.layer, qkv, rope, self.norms, self.out.fp8_weight))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each with a norm in front.

    The norm of the next part adds a part's output to the residual stream: one kernel on a GPU.
    `mlp_reader`: the FP8 weight that is the only reader of the MLP's input, if it is in FP8.
    """

    input_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: MLP | Experts
    mlp_reader: Fp8Weight | None

    def __call__(
        self,
        x: Summand | None,
        residual: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: AttentionBackend,
        kept: Tensor | None = None,
    ) -> Summand:
        """x: the previous layer's output, not yet added to `residual` (None: there is none);
        returns the same of this layer. The sum is copied to `kept` [tokens, hidden]."""
        reader = self.attention.qkv.fp8_weight
        if x is None:
            normed = self.input_norm(residual, reader)
        else:
            normed = self.input_norm.add(x, residual, reader)
        if kept is not None:
            kept.copy_(residual)
        attended = self.attention(normed, rope, attention)
        return self.mlp(self.post_attention_norm.add(attended, residual, self.mlp_reader))

    @property
    def linears(self) -> list[Linear | GatedLinear | RowLinear]:
        """The matrix products, without those of experts, which no BLAS library computes."""
        attention, mlp = self.attention, self.mlp
        of_mlp = (mlp.gate_up, mlp.down) if isinstance(mlp, MLP) else ()
        return [attention.qkv, attention.out, *of_mlp]


@dataclass(eq=False)
class Decoder:
    """The decoder, or one pipeline stage of it.

    `targets`: the tensors that a loader fills, by the names that a checkpoint must have. `loads`
    counts the tokens of each expert, if the model has experts. What a draft head reads is written
    to `kept`, unless that is None: the inputs of `kept_layers` side by side, or the last norm's
    output if there are none.
    """

    range: LayerRange
    layers: list[DecoderLayer]
    norm: RMSNorm | None  # last stage only
    rotary: RotaryEmbedding
    communicator: Communicator
    loads: ExpertLoads | None
    vocab_size: int
    hidden_size: int
    device: torch.device
    dtype: torch.dtype
    targets: dict[str, WeightTarget]
    embed: Embedding = field(init=False)  # first stage; last stage if tied to the LM head
    lm_head: Embedding = field(init=False)  # last stage only
    kept_layers: tuple[int, ...] = ()
    kept: Tensor | None = None  # [most tokens of a step, features]

    has_whole_logits = False  # on each rank: see Embedding.project_part

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionBackend
    ) -> Tensor:
        """token_ids, positions, slots [tokens] int64 -> normed hidden states [tokens, hidden]. A
        stage that is not the last returns the residual stream, which it also sends to the next.

        `attention.plan` has been called for this step.
        """
        stages, residual = self.communicator.stages, None
        if self.range.first > 0:
            shape = (len(token_ids), self.hidden_size)
            residual = torch.empty(shape, dtype=self.dtype, device=self.device)
            stages.receive(residual)
        hidden = self.compute(token_ids, positions, slots, attention, residual)
        if self.norm is None:
            stages.send(hidden)
        return hidden

    def compute(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionBackend,
        residual: Tensor | None,
    ) -> Tensor:
        """`forward` without communication between stages. `residual` [tokens, hidden] comes from
        the previous stage and is overwritten; None on the first."""
        if self.loads is not None:
            self.loads.slots = slots
        x: Summand | None = None
        residual = self.embed(token_ids) if residual is None else residual
        rope = self.rotary(positions)
        kept = self._kept_parts(len(token_ids))
        for place, layer in enumerate(self.layers):
            x = layer(x, residual, rope, attention, kept.get(place))
        assert x is not None
        if self.norm is None:
            self.layers[-1].input_norm.add(x, residual)  # only the sum is needed
            return residual
        hidden = self.norm.add(x, residual)
        assert isinstance(hidden, Tensor)
        if self.kept is not None and not self.kept_layers:
            self.kept[: len(hidden)].copy_(hidden)
        return hidden

    def _kept_parts(self, num_tokens: int) -> dict[int, Tensor]:
        """The parts of `kept` for the inputs of `kept_layers`, by layer."""
        if self.kept is None or not self.kept_layers:
            return {}
        parts = self.kept[:num_tokens].view(num_tokens, -1, self.hidden_size).unbind(1)
        return dict(zip(self.kept_layers, parts, strict=True))
