"""The gateway's data of the served model, read from the JSON files of its directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...constraints.grammars import Grammars
from ...core.config import GatewayConfig
from ...core.errors import StartupFailed
from ...core.model_dir import eos_token_ids, read_json, resolve_model_dir
from ..text.no_tokenizer import NoTokenizer
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_file import load_tokenizer
from .constraints import ConstraintCheck


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits for requests. The sizes of the KV pools are None while no node is known.

    `max_prompt_tokens`: the size of the largest prefill pool. `max_total_tokens`: of the largest
    decode pool, for prompt and output.
    """

    model: str
    vocab_size: int
    max_model_len: int
    max_prompt_tokens: int | None = None
    max_total_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name, limits, tokenizer and constraints of the model; no weights. `limits` are the model's
    own, before any node is known."""

    limits: ModelLimits
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | NoTokenizer
    model_dir: Path
    constraints: ConstraintCheck

    @classmethod
    def load(cls, config: GatewayConfig) -> ServedModel:
        """Read the JSON files of the model directory; raises StartupFailed."""
        model_dir = resolve_model_dir(config.model)
        name = config.served_model_name or model_dir.resolve().name
        limits = _read_limits(model_dir, name)
        eos_ids = eos_token_ids(model_dir, limits.vocab_size)
        tokenizer: Tokenizer | NoTokenizer = NoTokenizer()
        if not config.skip_tokenizer_init:
            refuses_special = config.special_tokens_in_prompts == "refuse"
            tokenizer = load_tokenizer(model_dir, eos_ids, refuses_special=refuses_special)
        constraints = ConstraintCheck(Grammars(model_dir, limits.vocab_size, eos_ids))
        return cls(limits, eos_ids, tokenizer, model_dir, constraints)

    def close(self) -> None:
        """End its threads."""
        self.tokenizer.close()
        self.constraints.close()


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
