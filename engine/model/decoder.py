"""The decoder of Llama and its kin: RMSNorm, rotary GQA attention, SwiGLU, over flat batches.

Owns the weights' names and the order of operations. Attention and the KV pool are behind an
AttentionBackend; of several ranks each has its heads, and the norms add up what attention and MLP
gave on each. Knows no request, no block and no file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.attention.attention import AttentionBackend
from ...kernels.products.weights import Activations
from .communicator import Summand
from .layers import (
    Embedding,
    Linear,
    Outputs,
    Placement,
    RMSNorm,
    RotaryEmbedding,
    RowLinear,
    Targets,
)
from .model_config import ExpertsConfig, ModelConfig
from .sharding import Heads, heads_of_rank


class Attention:
    """Grouped-query attention with its four projections, and norms of q and k if it has them."""

    def __init__(self, index: int, prefix: str, config: ModelConfig, placement: Placement) -> None:
        self._layer = index
        self._head_dim = dim = config.head_dim
        communicator = placement.communicator
        heads = heads_of_rank(config, communicator.rank, communicator.size)
        self.qkv = Linear(
            _qkv_of_rank(prefix, config, heads),
            config.hidden_size,
            placement,
            has_bias=config.has_qkv_bias,
        )
        self.out = RowLinear(
            f"{prefix}.o_proj",
            config.hidden_size,
            config.num_heads * dim,
            placement,
            has_bias=config.has_output_bias,
        )
        self._ops, self._eps = placement.ops, config.rms_norm_eps
        self._kv_heads = heads.num_kv_heads
        names = ("q_norm", "k_norm") if config.has_qk_norm else ()
        self.head_norms = [RMSNorm(f"{prefix}.{name}", dim, self._eps, placement) for name in names]

    def __call__(
        self, x: Activations, rope: tuple[Tensor, Tensor], attention: AttentionBackend
    ) -> Summand:
        qkv = self.qkv(x).view(len(x), -1, self._head_dim)  # [tokens, heads + 2 kv_heads, dim]
        if self.head_norms:
            q_norm, k_norm = self.head_norms
            weights = (q_norm.weight, k_norm.weight)
            qkv = self._ops.norm_heads(qkv, weights, self._kv_heads, self._eps)
        return self.out(attention.run(self._layer, qkv, rope).view(len(x), -1))

    def targets(self) -> Targets:
        yield from self.qkv.targets()
        yield from self.out.targets()
        for norm in self.head_norms:
            yield from norm.targets()


def _qkv_of_rank(prefix: str, config: ModelConfig, heads: Heads) -> list[Outputs]:
    dim = config.head_dim
    q = (heads.num_heads * dim, heads.first_head * dim, config.num_heads * dim)
    kv = (heads.num_kv_heads * dim, heads.first_kv_head * dim, config.num_kv_heads * dim)
    parts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    return [Outputs(f"{prefix}.{name}", *part) for name, part in parts.items()]


class MLP:
    """The gated feed-forward part. Each rank has an even part of the inner dimension, and gives a
    summand of the output."""

    def __init__(
        self, prefix: str, hidden: int, inner: int, placement: Placement, *, has_bias: bool = False
    ) -> None:
        names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.gate_up = Linear(
            [Outputs.of_rank(name, inner, placement.communicator) for name in names],
            hidden,
            placement,
            has_bias=has_bias,
        )
        self.down = RowLinear(f"{prefix}.down_proj", hidden, inner, placement, has_bias=has_bias)

    def __call__(self, x: Activations) -> Summand:
        return self.down(self.gate_up.gated(x, self.down.fp8_weight))

    def product(self, x: Tensor) -> Tensor:
        """The same: see RowLinear."""
        return self.down.product(self.gate_up.gated(x, self.down.fp8_weight))

    def targets(self) -> Targets:
        yield from self.gate_up.targets()
        yield from self.down.targets()


class Experts:
    """Each token goes through the few of many MLPs that a router likes best (Shazeer et al. 2017).

    The reference: one expert after the other over the tokens that chose it. The router is the same
    on all ranks, and so is its choice.
    """

    def __init__(
        self, prefix: str, hidden: int, config: ExpertsConfig, placement: Placement
    ) -> None:
        self._config = config
        router = Outputs.whole(f"{prefix}.gate", config.num_experts)
        self.router = Linear([router], hidden, placement)
        inner = config.intermediate_size
        self.experts = [
            MLP(f"{prefix}.experts.{index}", hidden, inner, placement)
            for index in range(config.num_experts)
        ]

    def __call__(self, x: Activations) -> Tensor:
        assert isinstance(x, Tensor), "more than one weight reads it"
        weights, chosen = self._route(x)
        out = torch.zeros_like(x)
        for index in torch.unique(chosen).tolist():
            tokens, place = torch.where(chosen == index)
            inputs = x[tokens]
            if len(tokens) == 1:
                # BLAS multiplies a single row by another routine: see CpuSteps.
                inputs = inputs.expand(2, -1)
            computed = self.experts[index].product(inputs)[: len(tokens)]
            out.index_add_(0, tokens, computed * weights[tokens, place, None])
        return out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] -> weights and experts, [tokens, num_experts_per_token] each."""
        shares = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = shares.topk(self._config.num_experts_per_token, dim=-1)
        if self._config.has_normed_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def targets(self) -> Targets:
        yield from self.router.targets()
        for expert in self.experts:
            yield from expert.targets()


class DecoderLayer:
    """Attention and MLP, each behind a norm.

    What a part computes is added to the residual stream by the norm of the next one, which is one
    kernel on a GPU.
    """

    def __init__(self, index: int, config: ModelConfig, placement: Placement) -> None:
        prefix, eps = f"model.layers.{index}", config.rms_norm_eps
        self.input_norm = RMSNorm(f"{prefix}.input_layernorm", config.hidden_size, eps, placement)
        self.attention = Attention(index, f"{prefix}.self_attn", config, placement)
        self.post_attention_norm = RMSNorm(
            f"{prefix}.post_attention_layernorm", config.hidden_size, eps, placement
        )
        self.mlp = _make_mlp(index, f"{prefix}.mlp", config, placement)
        self._mlp_reader = self.mlp.gate_up.fp8_weight if isinstance(self.mlp, MLP) else None

    def __call__(
        self,
        x: Summand | None,
        residual: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: AttentionBackend,
    ) -> Summand:
        """x: what is to be added to `residual` yet, if anything; returns the same for the next."""
        reader = self.attention.qkv.fp8_weight
        if x is None:
            normed = self.input_norm(residual, reader)
        else:
            normed = self.input_norm.add(x, residual, reader)
        attended = self.attention(normed, rope, attention)
        return self.mlp(self.post_attention_norm.add(attended, residual, self._mlp_reader))

    def targets(self) -> Targets:
        for part in (self.input_norm, self.attention, self.post_attention_norm, self.mlp):
            yield from part.targets()


def _make_mlp(index: int, prefix: str, config: ModelConfig, placement: Placement) -> MLP | Experts:
    experts, hidden = config.experts, config.hidden_size
    if experts is not None and index in experts.layers:
        return Experts(prefix, hidden, experts, placement)
    inner = config.intermediate_size
    return MLP(prefix, hidden, inner, placement, has_bias=config.has_mlp_bias)


class Decoder:
    """The whole decoder. Its weights are uninitialised until a loader filled `targets()`."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self.device = placement.device
        self.communicator = placement.communicator
        self.vocab_size = config.vocab_size
        self.embed = Embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, placement
        )
        self.layers = [DecoderLayer(i, config, placement) for i in range(config.num_layers)]
        self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps, placement)
        self.lm_head = self.embed
        if not config.has_tied_embeddings:
            self.lm_head = Embedding(
                "lm_head", config.vocab_size, config.hidden_size, placement, is_head=True
            )
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, placement.device)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """token_ids, positions [tokens] int64 -> hidden states [tokens, hidden], normed.

        `attention` has been planned for this step.
        """
        x: Summand | None = None
        residual = self.embed(token_ids)
        rope = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, residual, rope, attention)
        hidden = self.norm(residual) if x is None else self.norm.add(x, residual)
        assert isinstance(hidden, Tensor)
        return hidden

    def targets(self) -> Targets:
        """Every tensor a checkpoint must have, and where it goes."""
        yield from self.embed.targets()
        for layer in self.layers:
            yield from layer.targets()
        yield from self.norm.targets()
        if self.lm_head is not self.embed:
            yield from self.lm_head.targets()
