"""`--speculative-config`: how an engine drafts tokens, in vLLM's JSON form. Validated here."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from .errors import StartupFailed

NGRAM, DRAFT_MODEL, EAGLE3, MTP = "ngram", "draft_model", "eagle3", "mtp"
METHODS = (NGRAM, DRAFT_MODEL, EAGLE3, MTP)
MAX_DRAFTS = 16  # draft tokens per sequence and step
_MAX_LOOKUP = 64
_FLAG = "--speculative-config"
_DRAFT_EXAMPLE = '\'{"method": "draft_model", "model": "PATH", "num_speculative_tokens": 4}\''
_EXAMPLE = '\'{"method": "ngram", "num_speculative_tokens": 4}\''


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """`num_speculative_tokens`: most draft tokens per sequence and step. `model`: the folder of the
    draft model or head. The n-gram method looks up the last tokens of the sequence, the longest
    n-gram first: `prompt_lookup_max` down to `prompt_lookup_min` tokens.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        """Raises StartupFailed."""
        if self.method not in METHODS:
            known = " or ".join(f'"{method}"' for method in METHODS)
            raise StartupFailed(f'{_FLAG}: "method" must be {known}', hint=_EXAMPLE)
        _check("num_speculative_tokens", self.num_speculative_tokens, MAX_DRAFTS)
        _check("prompt_lookup_max", self.prompt_lookup_max, _MAX_LOOKUP)
        _check("prompt_lookup_min", self.prompt_lookup_min, self.prompt_lookup_max)
        if self.model is not None and not isinstance(self.model, str):
            raise StartupFailed(f"{_FLAG}: 'model' must be a model directory")


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """The flag's value; raises StartupFailed."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise StartupFailed(f"{_FLAG} is not JSON: {error}", hint=_EXAMPLE) from None
    if not isinstance(given, dict):
        raise StartupFailed(f"{_FLAG} must be a JSON object", hint=_EXAMPLE)
    known = [field.name for field in fields(SpeculativeConfig)]
    for name in given:
        if name not in known:
            raise StartupFailed(
                f"{_FLAG}: {name!r} is not known", hint=f"known: {', '.join(known)}"
            )
    for name in ("method", "num_speculative_tokens"):
        if name not in given:
            raise StartupFailed(f"{_FLAG}: {name!r} is missing", hint=_EXAMPLE)
    lookup = {"prompt_lookup_max", "prompt_lookup_min"} & given.keys()
    if len(lookup) == 1:  # as in vLLM: the given one sets both
        both = given[next(iter(lookup))]
        given |= dict.fromkeys(("prompt_lookup_max", "prompt_lookup_min"), both)
    config = SpeculativeConfig(**given)
    has_folder = config.method in (DRAFT_MODEL, EAGLE3)
    if not has_folder and "model" in given:
        raise StartupFailed(f'{_FLAG}: \'model\' is not for "method": "{config.method}"')
    if has_folder and config.model is None:
        raise StartupFailed(f"{_FLAG}: 'model' is missing", hint=_DRAFT_EXAMPLE)
    if config.method != NGRAM and lookup:
        raise StartupFailed(f'{_FLAG}: {min(lookup)!r} is not for "method": "{config.method}"')
    return config


def _check(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise StartupFailed(f"{_FLAG}: {name!r} must be an integer in [1, {most}]")
