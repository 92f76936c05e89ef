"""The model as the gateway knows it: its name, its limits, its tokenizer. Never its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core.config import GatewayConfig
from ..core.errors import StartupFailed
from ..core.model_dir import eos_token_ids, read_json, resolve_model_dir
from .tokenizer import Tokenizer
from .validation import ModelLimits


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`limits` are the model's own, before any node is known."""

    limits: ModelLimits
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer

    @classmethod
    def load(cls, config: GatewayConfig) -> ServedModel:
        """Read the model directory's JSON files; raises StartupFailed saying what is wrong."""
        model_dir = resolve_model_dir(config.model)
        name = config.served_model_name or model_dir.resolve().name
        eos_ids = eos_token_ids(model_dir)
        return cls(_read_limits(model_dir, name), eos_ids, Tokenizer.load(model_dir, eos_ids))


def _read_limits(model_dir: Path, name: str) -> ModelLimits:
    path = model_dir / "config.json"
    config = read_json(path)
    found = {}
    for key in ("vocab_size", "max_position_embeddings"):
        value = config.get(key)
        if type(value) is not int or value < 1:
            raise StartupFailed(f"{path} has no {key}", hint="--model takes a decoder-only model")
        found[key] = value
    return ModelLimits(name, found["vocab_size"], found["max_position_embeddings"])
