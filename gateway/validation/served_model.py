"""The served model as the gateway knows it: read from its directory's JSON files."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...constraints.grammars import Grammars
from ...core.config import GatewayConfig
from ...core.errors import InvalidRequest, Overloaded, StartupFailed
from ...core.model_dir import eos_token_ids, read_json, resolve_model_dir
from ...core.request.request import Constraint
from ..text.library_failures import refusing
from ..text.no_tokenizer import NoTokenizer
from ..text.tokenizer import Tokenizer
from .validation import ModelLimits

_MAX_WAITING = 64


class ConstraintCheck:
    """Judges constraints on a thread before anybody computes a token for one; belongs to the event
    loop. Bounded in number, and in time by what the compiler takes: an endless grammar is refused.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="constraints")
        self._num_waiting = 0

    @property
    def refusal(self) -> str | None:
        """Why this model's outputs cannot be constrained by anybody here, or None."""
        return self._grammars.refusal

    async def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequest with what is wrong, Overloaded."""
        if self.refusal is not None:
            raise InvalidRequest(self.refusal, "constraint", "unsupported_parameter")
        if self._grammars.is_kept(constraint):
            return
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded("too many new constraints at once")
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pool, self._compile, constraint)
        finally:
            self._num_waiting -= 1

    def _compile(self, constraint: Constraint) -> None:
        with refusing("the constraint cannot be used", "constraint"):
            self._grammars.compile(constraint)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name, limits, tokenizer, which constraints it can take; never its weights. `limits` are the
    model's own, before any node is known."""

    limits: ModelLimits
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | NoTokenizer
    model_dir: Path
    constraints: ConstraintCheck

    @classmethod
    def load(cls, config: GatewayConfig) -> ServedModel:
        """Read the model directory's JSON files; raises StartupFailed saying what is wrong."""
        model_dir = resolve_model_dir(config.model)
        name = config.served_model_name or model_dir.resolve().name
        eos_ids = eos_token_ids(model_dir)
        tokenizer = (
            NoTokenizer()
            if config.skip_tokenizer_init
            else Tokenizer.load(
                model_dir,
                eos_ids,
                refuses_special=config.special_tokens_in_prompts == "refuse",
            )
        )
        limits = _read_limits(model_dir, name)
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
