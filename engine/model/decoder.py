"""The decoder of Llama and its kin: RMSNorm, rotary GQA attention, SwiGLU, over flat batches.

Owns the weights' names and the order of operations. Attention and the KV pool are behind an
AttentionBackend; of several ranks each has its heads, and the norms add up what attention and MLP
gave on each. A stage of a pipeline has some of the layers, and passes the residual stream on. Knows
no request, no block and no file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.attention.attention import AttentionBackend
from ...kernels.experts.experts import ExpertLoads, LayerLoads
from ...kernels.kv.kv_blocks import HeadNorms
from ...kernels.products.weights import Activations
from .communicator import Summand
from .experts import Experts
from .layers import (
    MLP,
    Embedding,
    Linear,
    LinearBase,
    Outputs,
    Product,
    RMSNorm,
    RotaryEmbedding,
    RowLinear,
)
from .model_config import ModelConfig
from .sharding import Heads, heads_of_rank
from .stages import LayerRange
from .weights.placement import Placement


class Attention:
    """Grouped-query attention with its four projections, and norms of q and k if it has them.

    `place`: of the layer among those whose KV lies here. `num_inputs`: the hidden size unless
    given."""

    def __init__(
        self,
        place: int,
        prefix: str,
        config: ModelConfig,
        placement: Placement,
        num_inputs: int | None = None,
    ) -> None:
        self._layer = placement.layers_in_front + place
        self._head_dim = dim = config.head_dim
        communicator = placement.communicator
        heads = heads_of_rank(config, communicator.rank, communicator.size)
        self.qkv = Linear(
            _qkv_of_rank(prefix, config, heads),
            num_inputs or config.hidden_size,
            placement,
            has_bias=config.has_qkv_bias,
        )
        self.out = RowLinear(
            [Outputs.whole(f"{prefix}.o_proj", config.hidden_size)],
            config.num_heads * dim,
            placement,
            has_bias=config.has_output_bias,
        )
        self._norms: HeadNorms | None = None
        if config.has_qk_norm:
            eps, names = config.rms_norm_eps, ("q_norm", "k_norm")
            q, k = (RMSNorm(f"{prefix}.{name}", dim, eps, placement).weight for name in names)
            self._norms = HeadNorms(q, k, eps)
        self._spread: Tensor | None = None  # which heads of the product the pool's layers have
        num_copies = (placement.pool_kv_heads or heads.num_kv_heads) // heads.num_kv_heads
        if num_copies > 1:
            queries, k_and_v = torch.arange(heads.num_heads), torch.arange(2 * heads.num_kv_heads)
            spread = [queries, heads.num_heads + k_and_v.repeat_interleave(num_copies)]
            self._spread = torch.cat(spread).to(placement.device)

    def __call__(
        self, x: Activations, rope: tuple[Tensor, Tensor], attention: AttentionBackend
    ) -> Summand:
        qkv = self.qkv(x).view(len(x), -1, self._head_dim)  # [tokens, heads + 2 kv_heads, dim]
        if self._spread is not None:
            qkv = qkv.index_select(1, self._spread)
        return self.out(attention.run(self._layer, qkv, rope, self._norms, self.out.fp8_weight))


def _qkv_of_rank(prefix: str, config: ModelConfig, heads: Heads) -> list[Outputs]:
    dim = config.head_dim
    q = (heads.num_heads * dim, heads.first_head * dim, config.num_heads * dim)
    kv = (heads.num_kv_heads * dim, heads.first_kv_head * dim, config.num_kv_heads * dim)
    parts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    return [Outputs(f"{prefix}.{name}", *part) for name, part in parts.items()]


class DecoderLayer:
    """Attention and MLP, each behind a norm.

    What a part computes is added to the residual stream by the norm of the next one, which is one
    kernel on a GPU.
    """

    def __init__(
        self,
        index: int,
        place: int,
        config: ModelConfig,
        placement: Placement,
        loads: ExpertLoads | None,
        prefix: str | None = None,
    ) -> None:
        prefix, eps = prefix or f"model.layers.{index}", config.rms_norm_eps
        self.input_norm = RMSNorm(f"{prefix}.input_layernorm", config.hidden_size, eps, placement)
        self.attention = Attention(place, f"{prefix}.self_attn", config, placement)
        self.post_attention_norm = RMSNorm(
            f"{prefix}.post_attention_layernorm", config.hidden_size, eps, placement
        )
        self.mlp = _make_mlp(index, prefix, config, placement, loads)
        self._mlp_reader = self.mlp.gate_up.fp8_weight if isinstance(self.mlp, MLP) else None

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
        return self.mlp(self.post_attention_norm.add(attended, residual, self._mlp_reader))

    @property
    def linears(self) -> list[LinearBase]:
        """What multiplies inputs with weights, but for experts, which no library does."""
        mlp = [self.mlp.gate_up, self.mlp.down] if isinstance(self.mlp, MLP) else []
        return [self.attention.qkv, self.attention.out, *mlp]


def _make_mlp(
    index: int, prefix: str, config: ModelConfig, placement: Placement, loads: ExpertLoads | None
) -> MLP | Experts:
    experts, hidden = config.experts, config.hidden_size
    if experts is not None and index in experts.layers:
        of_layer = None if loads is None else LayerLoads(loads, experts.layers.index(index))
        return Experts(prefix, hidden, experts, placement, of_layer)
    inner = config.intermediate_size
    return MLP(f"{prefix}.mlp", hidden, inner, placement, has_bias=config.has_mlp_bias)


class Decoder:
    """The decoder, or one stage of it. Its weights are uninitialised until a loader filled
    `targets`: every tensor that a checkpoint must have.

    `loads` counts what experts are chosen, if the model has any; `layers`: those of this stage, all
    unless given. The first stage has the embedding, the last one the norm and the LM head.
    """

    has_whole_logits = False  # of a rank: see Embedding.project_part
    embed: Embedding  # of the first stage, and of the last where it is the LM head too
    lm_head: Embedding  # of the last stage alone

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        loads: ExpertLoads | None = None,
        layers: LayerRange | None = None,
    ) -> None:
        placement = placement.of_model()
        self.targets = placement.targets
        self.loads = loads
        self.range = layers or LayerRange(0, config.num_layers, config.num_layers)
        self._is_first_stage, self._is_last_stage = self.range.is_first, self.range.is_last
        self.hidden_size = config.hidden_size
        self.device, self.dtype = placement.device, placement.dtype
        self.communicator = placement.communicator
        self.vocab_size = config.vocab_size
        sizes = (config.vocab_size, config.hidden_size)
        if self.range.is_first or (self.range.is_last and config.has_tied_embeddings):
            self.embed = Embedding("model.embed_tokens", *sizes, placement)
        self.layers = [
            DecoderLayer(index, place, config, placement, loads)
            for place, index in enumerate(range(self.range.first, self.range.end))
        ]
        self._norm: RMSNorm | None = None
        if self.range.is_last:
            self._norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps, placement)
            if config.has_tied_embeddings:
                self.lm_head = self.embed
            else:
                self.lm_head = Embedding("lm_head", *sizes, placement, is_head=True)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, placement.device)
        self.kept_layers: tuple[int, ...] = ()  # whose inputs a draft head reads
        self.kept: Tensor | None = None  # see keep

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionBackend
    ) -> Tensor:
        """token_ids, positions, slots [tokens] int64 -> hidden states [tokens, hidden], normed; of
        a stage that is not the last, the residual stream, which the stage behind gets too.

        `attention` has been planned for this step.
        """
        stages, residual = self.communicator.stages, None
        if not self._is_first_stage:
            residual = self.new_residual(len(token_ids))
            stages.receive(residual)
        hidden = self.compute(token_ids, positions, slots, attention, residual)
        if not self._is_last_stage:
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
        if self._norm is None:
            assert x is not None
            self.layers[-1].input_norm.add(x, residual)  # for the sum alone
            return residual
        hidden = self._norm(residual) if x is None else self._norm.add(x, residual)
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
        """Of one layer's linears: how many inputs each has, and what it does."""
        return [(one.weight.shape[1], one.alone) for one in self.layers[0].linears]

    def new_residual(self, num_tokens: int) -> Tensor:
        """Room for what the stage before sends, [tokens, hidden]."""
        return torch.empty(num_tokens, self.hidden_size, dtype=self.dtype, device=self.device)
