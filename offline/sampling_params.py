"""SamplingParams with vLLM's names; validated when used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..client.messages import GenerateParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Ranges, defaults and meanings: docs/sampling.md. None means an absent field there, except
    for `max_tokens`: up to the end of the context.

    One of `json_schema` (a schema or its text), `regex`, `choice` and `grammar` (Lark) constrains
    the whole output.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    tbt_target_ms: float = 0.0
    speculative: bool = True
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    cache_salt: str | None = None

    def as_params(self) -> GenerateParams:
        """Keyword arguments for the client's `generate`: all fields that are not None."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["top_k"] = max(0, self.top_k)  # vLLM's -1: no limit
        found: Any = {name: value for name, value in given.items() if value is not None}
        params: GenerateParams = found
        return params
