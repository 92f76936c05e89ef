"""A model directory without weights: one token per byte, and one EOS."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS_ID = 256
VOCAB_SIZE = 264  # more than the tokenizer's, as in real models


def write_byte_model(folder: Path, max_model_len: int = 512) -> Path:
    """Write tokenizer.json, config.json and generation_config.json; returns the folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": max_model_len}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    return folder


def _byte_of(letter: str) -> int:
    """The byte for a letter of the byte-level alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if ord(letter) in printable:
        return ord(letter)
    return [b for b in range(256) if b not in printable][ord(letter) - 256]
