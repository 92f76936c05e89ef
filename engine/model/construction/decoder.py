"""Builds a model's decoder, or one pipeline stage of it, from its configuration: the modules of a
layer, the rank's part of each, and the names of their weights. Knows no file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.experts.experts import ExpertLoads, LayerLoads
from ....kernels.kv.kv_blocks import HeadNorms
from ..decoder import Attention, Decoder, DecoderLayer
from ..experts import Experts
from ..layers import MLP, Linear, RowLinear
from ..model_config import ModelConfig
from ..rotary import make_rotary_embedding
from ..sharding import Heads, Outputs, heads_of_rank
from ..stages import LayerRange
from ..weights.placement import Placement
from .experts import make_experts
from .layers import all_outputs, make_embedding, make_linear, make_mlp, make_norm


def make_decoder(
    config: ModelConfig,
    placement: Placement,
    loads: ExpertLoads | None = None,
    layers: LayerRange | None = None,
) -> Decoder:
    """The decoder; its weights are uninitialised until a loader fills `Decoder.targets`.

    `loads` counts the tokens of each expert, if the model has experts; `layers`: those of this
    stage; None: all. The first stage has the embedding, the last one the norm and the LM head.
    """
    placement = placement.of_model()
    layers = layers or LayerRange(0, config.num_layers, config.num_layers)
    sizes = (config.vocab_size, config.hidden_size)
    embed = lm_head = norm = None
    if layers.is_first or (layers.is_last and config.has_tied_embeddings):
        embed = make_embedding("model.embed_tokens", *sizes, placement)
    made = [
        make_layer(index, place, config, placement, loads)
        for place, index in enumerate(range(layers.first, layers.end))
    ]
    if layers.is_last:
        norm = make_norm("model.norm", config.hidden_size, config.rms_norm_eps, placement)
        is_tied = config.has_tied_embeddings
        lm_head = embed if is_tied else make_embedding("lm_head", *sizes, placement, is_head=True)
    decoder = Decoder(
        layers,
        made,
        norm,
        make_rotary_embedding(config.rope, config.head_dim, placement.device),
        placement.communicator,
        loads,
        *sizes,
        placement.device,
        placement.dtype,
        placement.targets,
    )
    if embed is not None:
        decoder.embed = embed
    if lm_head is not None:
        decoder.lm_head = lm_head
    return decoder


def make_layer(
    index: int,
    place: int,
    config: ModelConfig,
    placement: Placement,
    loads: ExpertLoads | None = None,
    prefix: str | None = None,
) -> DecoderLayer:
    """Layer `index` of the model. `place`: its index among the layers whose KV this rank stores."""
    prefix = prefix or f"model.layers.{index}"
    hidden, eps = config.hidden_size, config.rms_norm_eps
    input_norm = make_norm(f"{prefix}.input_layernorm", hidden, eps, placement)
    attention = make_attention(place, f"{prefix}.self_attn", config, placement)
    second_norm = make_norm(f"{prefix}.post_attention_layernorm", hidden, eps, placement)
    mlp = _make_mlp(index, prefix, config, placement, loads)
    mlp_reader = mlp.gate_up.fp8_weight if isinstance(mlp, MLP) else None
    return DecoderLayer(input_norm, attention, second_norm, mlp, mlp_reader)


def make_attention(
    place: int,
    prefix: str,
    config: ModelConfig,
    placement: Placement,
    num_inputs: int | None = None,
) -> Attention:
    """`place`: the layer's index among those whose KV this rank stores. `num_inputs`: None: the
    hidden size."""
    communicator, dim = placement.communicator, config.head_dim
    heads = heads_of_rank(config, communicator.rank, communicator.size)
    qkv = make_linear(
        Linear,
        _qkv_of_rank(prefix, config, heads),
        num_inputs or config.hidden_size,
        placement,
        has_bias=config.has_qkv_bias,
    )
    out = make_linear(
        RowLinear,
        [all_outputs(f"{prefix}.o_proj", config.hidden_size)],
        config.num_heads * dim,
        placement,
        has_bias=config.has_output_bias,
    )
    norms: HeadNorms | None = None
    if config.has_qk_norm:
        eps, names = config.rms_norm_eps, ("q_norm", "k_norm")
        q, k = (make_norm(f"{prefix}.{name}", dim, eps, placement).weight for name in names)
        norms = HeadNorms(q, k, eps)
    spread = _spread(heads, placement)
    return Attention(placement.layers_in_front + place, dim, qkv, out, norms, spread)


def _qkv_of_rank(prefix: str, config: ModelConfig, heads: Heads) -> list[Outputs]:
    dim = config.head_dim
    q = (heads.num_heads * dim, heads.first_head * dim, config.num_heads * dim)
    kv = (heads.num_kv_heads * dim, heads.first_kv_head * dim, config.num_kv_heads * dim)
    parts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    return [Outputs(f"{prefix}.{name}", *part) for name, part in parts.items()]


def _spread(heads: Heads, placement: Placement) -> Tensor | None:
    """See Attention.spread."""
    num_copies = (placement.pool_kv_heads or heads.num_kv_heads) // heads.num_kv_heads
    if num_copies == 1:
        return None
    queries, k_and_v = torch.arange(heads.num_heads), torch.arange(2 * heads.num_kv_heads)
    spread = [queries, heads.num_heads + k_and_v.repeat_interleave(num_copies)]
    return torch.cat(spread).to(placement.device)


def _make_mlp(
    index: int, prefix: str, config: ModelConfig, placement: Placement, loads: ExpertLoads | None
) -> MLP | Experts:
    experts, hidden = config.experts, config.hidden_size
    if experts is not None and index in experts.layers:
        of_layer = None if loads is None else LayerLoads(loads, experts.layers.index(index))
        return make_experts(prefix, hidden, experts, placement, of_layer)
    inner = config.intermediate_size
    return make_mlp(f"{prefix}.mlp", hidden, inner, placement, has_bias=config.has_mlp_bias)
