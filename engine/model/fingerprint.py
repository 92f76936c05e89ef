"""The named fields that must be equal on two engines before one may use the other's KV.

They are compared field by field at pair set-up, so that a refusal names the fields that differ;
`short` is the digest in membership entries and block hashes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

import torch

from ..kv.kv_memory import KvLayout
from .model_config import ModelConfig

LAYOUT_VERSION = "1"  # of [num_blocks, num_layers, 2, kv_heads, block_size, head_dim]


def fingerprint_fields(
    model: ModelConfig, weights: str, layout: KvLayout, dtype: torch.dtype, kv_cache_dtype: str
) -> dict[str, str]:
    """The fields of one engine, however many ranks hold its layers and heads.

    `weights` identifies the weights: checkpoint.weights_identity, or the seed of dummy ones.
    `dtype` is what the model computes in, `kv_cache_dtype` as in EngineConfig.
    """
    return {
        "model": model_hash(model, weights),
        "dtype": str(dtype).removeprefix("torch."),
        "kv_cache_dtype": kv_cache_dtype,
        "block_size": str(layout.block_size),
        "num_layers": str(model.num_layers),
        "num_kv_heads": str(model.num_kv_heads),
        "head_dim": str(model.head_dim),
        "layer_range": f"0:{model.num_layers}",
        "head_range": f"0:{model.num_kv_heads}",
        "layout_version": LAYOUT_VERSION,
    }


def short(fields: Mapping[str, str]) -> str:
    """A digest of all fields in any order: 32 hex digits."""
    return _digest(dict(fields))


def model_hash(model: ModelConfig, weights: str) -> str:
    """A digest of all that determines the model's results; `weights`: see fingerprint_fields."""
    essentials = dataclasses.asdict(model)
    # These two change no result: the length limit, and the type that weights were stored in.
    del essentials["max_position_embeddings"], essentials["dtype"]
    essentials["rope"] = repr(model.rope)  # includes the scaling's type, which asdict leaves out
    return _digest({"config": essentials, "weights": weights})


def _digest(value: object) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
