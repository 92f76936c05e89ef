"""Llama: RMSNorm, rotary GQA attention and SwiGLU over a flat batch of tokens.

Owns the weights' names and the order of operations. Attention and the KV pool are behind an
AttentionBackend; knows no request, no block and no file.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..kernels.attention import AttentionBackend
from ..kernels.rope import rope_angles
from .layers import Embedding, Linear, Placement, RMSNorm, Target, rope_inv_freq
from .model_config import ModelConfig


class Attention:
    """Grouped-query attention with its four projections."""

    def __init__(self, index: int, prefix: str, config: ModelConfig, placement: Placement) -> None:
        self._layer = index
        self._head_dim = config.head_dim
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        has_bias = config.has_attention_bias
        self.qkv = Linear(
            [
                (f"{prefix}.q_proj", q_size),
                (f"{prefix}.k_proj", kv_size),
                (f"{prefix}.v_proj", kv_size),
            ],
            config.hidden_size,
            placement,
            has_bias=has_bias,
        )
        self.out = Linear(
            [(f"{prefix}.o_proj", config.hidden_size)], q_size, placement, has_bias=has_bias
        )

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], attention: AttentionBackend
    ) -> Tensor:
        qkv = self.qkv(x).view(len(x), -1, self._head_dim)  # [tokens, heads + 2 kv_heads, dim]
        return self.out(attention.run(self._layer, qkv, rope).view(len(x), -1))

    def targets(self) -> Iterator[Target]:
        yield from self.qkv.targets()
        yield from self.out.targets()


class MLP:
    """The gated feed-forward part."""

    def __init__(self, prefix: str, config: ModelConfig, placement: Placement) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        has_bias = config.has_mlp_bias
        self._ops = placement.ops
        self.gate_up = Linear(
            [(f"{prefix}.gate_proj", inner), (f"{prefix}.up_proj", inner)],
            hidden,
            placement,
            has_bias=has_bias,
        )
        self.down = Linear([(f"{prefix}.down_proj", hidden)], inner, placement, has_bias=has_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._ops.silu_and_mul(self.gate_up(x)))

    def targets(self) -> Iterator[Target]:
        yield from self.gate_up.targets()
        yield from self.down.targets()


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
        self.mlp = MLP(f"{prefix}.mlp", config, placement)

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: AttentionBackend,
    ) -> Tensor:
        """x: what is to be added to `residual` yet, if anything; returns the same for the next."""
        normed = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        attended = self.attention(normed, rope, attention)
        return self.mlp(self.post_attention_norm.add(attended, residual))

    def targets(self) -> Iterator[Target]:
        for part in (self.input_norm, self.attention, self.post_attention_norm, self.mlp):
            yield from part.targets()


class Decoder:
    """The whole decoder. Its weights are uninitialised until a loader filled `targets()`."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self.device = placement.device
        self.embed = Embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, placement
        )
        self.layers = [DecoderLayer(i, config, placement) for i in range(config.num_layers)]
        self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps, placement)
        self.lm_head = (
            None
            if config.has_tied_embeddings
            else Linear([("lm_head", config.vocab_size)], config.hidden_size, placement)
        )
        self._inv_freq = rope_inv_freq(config.rope, config.head_dim).to(placement.device)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """token_ids, positions [tokens] int64 -> hidden states [tokens, hidden], normed.

        `attention` has been planned for this step.
        """
        residual, x = self.embed(token_ids), None
        rope = rope_angles(positions, self._inv_freq)
        for layer in self.layers:
            x = layer(x, residual, rope, attention)
        return self.norm(residual) if x is None else self.norm.add(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]."""
        return self.embed.project(hidden) if self.lm_head is None else self.lm_head(hidden)

    def targets(self) -> Iterator[Target]:
        """Every tensor a checkpoint must have, and where it goes."""
        yield from self.embed.targets()
        for layer in self.layers:
            yield from layer.targets()
        yield from self.norm.targets()
        if self.lm_head is not None:
            yield from self.lm_head.targets()
