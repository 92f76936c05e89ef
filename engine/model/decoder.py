"""The decoder of Llama and its kin: RMSNorm, rotary GQA attention, SwiGLU, over flat batches.

Owns the order of operations; construction/decoder.py makes the modules. Attention and the KV pool
are behind an AttentionBackend; of several ranks each has its heads, and the norms add up what
attention and MLP gave on each. A stage of a pipeline has some of the layers, and passes the
residual stream on. Knows no request, no block and no name of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kernels.attention.attention import AttentionBackend
from ...kernels.experts.experts import ExpertLoads
from ...kernels.kv.kv_blocks import HeadNorms
from ...kernels.products.weights import Activations, Fp8Weight
from .communicator import Communicator, Summand
from .experts import Experts
from .layers import (
    MLP,
    Embedding,
    GatedLinear,
    Linear,
    Product,
    RMSNorm,
    RotaryEmbedding,
    RowLinear,
)
from .stages import LayerRange
from .weights.targets import Target


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with its projections, and norms of q and k if it has them.

    `layer` of the KV pool. `spread`: the heads of the product in the order of the pool's, where it
    has each KV head of this rank several times.
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
    """Attention and MLP, each behind a norm.

    What a part computes is added to the residual stream by the norm of the next one, which is one
    kernel on a GPU. `mlp_reader`: the weight that alone reads the MLP's input, if it is in FP8.
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
        """x: what is to be added to `residual` yet, if anything; returns the same for the next.
        `kept` [tokens, hidden] gets the sum."""
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
        """What multiplies inputs with weights, but for experts, which no library does."""
        attention, mlp = self.attention, self.mlp
        of_mlp = (mlp.gate_up, mlp.down) if isinstance(mlp, MLP) else ()
        return [attention.qkv, attention.out, *of_mlp]


@dataclass(eq=False)
class Decoder:
    """The decoder, or one stage of it.

    `targets`: every tensor that a checkpoint must have, for a loader to fill. `loads` counts what
    experts are chosen, if the model has any.
    """

    range: LayerRange
    layers: list[DecoderLayer]
    norm: RMSNorm | None  # of the last stage
    rotary: RotaryEmbedding
    communicator: Communicator
    loads: ExpertLoads | None
    vocab_size: int
    hidden_size: int
    device: torch.device
    dtype: torch.dtype
    targets: dict[str, Target]
    embed: Embedding = field(init=False)  # of the first stage, and of the last if it is the LM head
    lm_head: Embedding = field(init=False)  # of the last stage alone
    kept_layers: tuple[int, ...] = ()  # whose inputs a draft head reads
    kept: Tensor | None = None  # see keep

    has_whole_logits = False  # of a rank: see Embedding.project_part

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionBackend
    ) -> Tensor:
        """token_ids, positions, slots [tokens] int64 -> hidden states [tokens, hidden], normed; of
        a stage that is not the last, the residual stream, which the stage behind gets too.

        `attention` has been planned for this step.
        """
        stages, residual = self.communicator.stages, None
        if not self.range.is_first:
            residual = self.new_residual(len(token_ids))
            stages.receive(residual)
        hidden = self.compute(token_ids, positions, slots, attention, residual)
        if not self.range.is_last:
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
        """What `forward` does between what it receives and what it sends: `residual`
        [tokens, hidden] is from the stage before, and is overwritten; None on the first."""
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
            self.layers[-1].input_norm.add(x, residual)  # for the sum alone
            return residual
        hidden = self.norm.add(x, residual)
        assert isinstance(hidden, Tensor)
        if self.kept is not None and not self.kept_layers:
            self.kept[: len(hidden)].copy_(hidden)
        return hidden

    def keep(self, most_tokens: int) -> None:
        """From now on `kept` has what a head reads of the last step, of which no one has more
        tokens: side by side the inputs of `kept_layers`, or without any what the last norm gave.
        It stays where it is: CUDA graphs write to it too."""
        self.kept = None  # first: there may be no memory for both
        width = max(1, len(self.kept_layers)) * self.hidden_size
        self.kept = torch.zeros(most_tokens, width, dtype=self.dtype, device=self.device)

    def _kept_parts(self, num_tokens: int) -> dict[int, Tensor]:
        """Room for the inputs of `kept_layers`, by layer."""
        if self.kept is None or not self.kept_layers:
            return {}
        parts = self.kept[:num_tokens].view(num_tokens, -1, self.hidden_size).unbind(1)
        return dict(zip(self.kept_layers, parts, strict=True))

    def products(self) -> list[tuple[int, Product]]:
        """Of one layer's linears: how many inputs each has, and what a step computes of it on this
        rank, without the others."""
        has_others = self.communicator.size > 1
        return [
            (one.weight.shape[1], one.product if has_others and isinstance(one, RowLinear) else one)
            for one in self.layers[0].linears
        ]

    def new_residual(self, num_tokens: int) -> Tensor:
        """Room for what the stage before sends, [tokens, hidden]."""
        return torch.empty(num_tokens, self.hidden_size, dtype=self.dtype, device=self.device)
