"""Tiny checkpoints written by transformers: an independent reference for the engine."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel

# One example of each variant of architecture and configuration, as arguments of `write_checkpoint`,
# with odd vocabularies and heads that do not fill the hidden size.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama, gqa 4:2": {},
    "llama, gqa 4:1, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama, mha 4:4, derived head_dim": {
        "num_key_value_heads": 4,
        "hidden_size": 128,
        "head_dim": None,
        "num_hidden_layers": 3,
    },
    "llama, biases, sharded": {
        "attention_bias": True,
        "mlp_bias": True,
        "max_shard_size": "200KB",
    },
    "llama, linear rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    },
    "llama, llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral, window": {"architecture": "MistralForCausalLM", "sliding_window": 40},
    "mistral, no window": {"architecture": "MistralForCausalLM", "sliding_window": None},
    "qwen2, tied": {
        "architecture": "Qwen2ForCausalLM",
        "vocab_size": 151,
        "tie_word_embeddings": True,
    },
    "qwen2, yarn, window of the upper layers": {
        "architecture": "Qwen2ForCausalLM",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", "vocab_size": 257},
    "qwen3, biases, window by layer_types": {
        "architecture": "Qwen3ForCausalLM",
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3-moe, a dense layer": {
        "architecture": "Qwen3MoeForCausalLM",
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3-moe, every second layer": {
        "architecture": "Qwen3MoeForCausalLM",
        "num_hidden_layers": 4,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
    },
    "qwen3-moe, merged": {
        "architecture": "Qwen3MoeForCausalLM",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "save_original_format": False,
    },
    "mixtral, moe": {
        "architecture": "MixtralForCausalLM",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 40,
    },
    "qwen2-moe": {
        "architecture": "Qwen2MoeForCausalLM",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
    },
}


def write_checkpoint(
    folder: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    seed: int = 0,
    max_shard_size: str = "5GB",
    has_varied_vectors: bool = False,
    save_original_format: bool = True,
    **changes: Any,
) -> PreTrainedModel:
    """Write a random model to `folder` and return it, in float32.

    Small, but with weights large enough that logits differ clearly and every block matters.
    `has_varied_vectors`: norms are not all one, biases not all zero. Without `save_original_format`
    a layer's experts are one tensor, as transformers stores them.
    """
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    torch.manual_seed(seed)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**(settings | changes))).eval().float()
    if has_varied_vectors:
        _vary_vectors(model)
    model.save_pretrained(
        folder, max_shard_size=max_shard_size, save_original_format=save_original_format
    )
    return model


class Written:
    """The last checkpoints by their arguments, since making one takes longer than copying it."""

    def __init__(self, write: Callable[..., PreTrainedModel], most: int = 24) -> None:
        self._write, self._most = write, most
        self._known: dict[str, tuple[dict[str, bytes], PreTrainedModel]] = {}

    def again(self, folder: Path, name: str, **settings: Any) -> PreTrainedModel:
        """Write the checkpoint to `folder`; returns a separate copy of the model."""
        key = repr((name, sorted(settings.items())))
        if key not in self._known:
            with TemporaryDirectory() as own:
                model = self._write(Path(own), name, **settings)
                files = {path.name: path.read_bytes() for path in Path(own).iterdir()}
            self._known[key] = files, model
            if len(self._known) > self._most:
                del self._known[next(iter(self._known))]
        files, model = self._known[key]
        folder.mkdir(exist_ok=True)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        torch.manual_seed(settings.get("seed", 0))
        return copy.deepcopy(model)


def weight_of(known: dict[str, Tensor], key: str) -> Tensor:
    """The transformers weight for a name in the checkpoint: one expert of a stack of all experts,
    or gate and up of a fused weight."""
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", key)
    if found is None:
        return known[key]
    layer, number, name = found.groups()
    if name == "down":
        return known[f"{layer}.down_proj"][int(number)]
    halves = known[f"{layer}.gate_up_proj"][int(number)].chunk(2)
    return halves[0] if name == "gate" else halves[1]


def _vary_vectors(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.3)


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json without merges: ids 0 to 2 are special, then one for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
