"""Tiny checkpoints that transformers writes: the outside source of what the engine must compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM


def write_checkpoint(
    folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **changes: Any
) -> LlamaForCausalLM:
    """Write a random Llama to `folder` and return it, in float32.

    Small, but with weights large enough that logits differ clearly and every block matters.
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
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval().float()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json without merges: ids 0 to 2 are special, then one for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
