"""Fields that are read in a way of their own: top_k's -1, logit_bias' keys, metadata's limits."""

from __future__ import annotations

import re
from typing import Any

from ....core.errors import InvalidRequest
from ...validation.sampling_validation import MAX_BIAS, MAX_BIASES
from .json_fields import NUMBER, UINT32_MAX, FieldKind, integer, invalid

_TOKEN_ID = re.compile(r"(0|[1-9][0-9]{0,9})\Z")  # as JSON writes integers: one id has one key
_MAX_PAIRS, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512

_ANY_K = integer(-1, UINT32_MAX)


def _top_k(value: Any, name: str) -> int:
    """-1 is how vLLM's clients say "no limit", which is 0 on our wire."""
    return max(0, int(_ANY_K.read(value, name)))


def _logit_bias(value: Any, name: str) -> dict[int, float]:
    if not isinstance(value, dict):
        raise invalid(name, "an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise InvalidRequest(
            f"at most {MAX_BIASES} biased tokens", param=name, code="array_too_long"
        )
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not _TOKEN_ID.match(key) or int(key) > UINT32_MAX:
            raise InvalidRequest(
                f"{name} names {key[:20]!r}, which is no token id",
                param=name,
                code="invalid_token_id",
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise InvalidRequest(f"{name} must have numbers", param=name, code="invalid_value")
        biases[int(key)] = NUMBER.read(bias, name)
    return biases


def _metadata(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid(name, "an object")
    if len(value) > _MAX_PAIRS:
        raise invalid(name, f"an object of at most {_MAX_PAIRS} pairs")
    for key, text in value.items():
        is_short = isinstance(text, str) and len(text) <= _MAX_VALUE_CHARS
        if len(key) > _MAX_KEY_CHARS or not is_short:
            what = f"keys of {_MAX_KEY_CHARS} and texts of {_MAX_VALUE_CHARS} characters at most"
            raise invalid(name, f"an object with {what}")
    return value


TOP_K = FieldKind({"type": "integer", "minimum": -1, "maximum": UINT32_MAX}, _top_k)
LOGIT_BIAS = FieldKind(
    {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        "maxProperties": MAX_BIASES,
    },
    _logit_bias,
)
METADATA = FieldKind(
    {
        "type": "object",
        "propertyNames": {"maxLength": _MAX_KEY_CHARS},
        "additionalProperties": {"type": "string", "maxLength": _MAX_VALUE_CHARS},
        "maxProperties": _MAX_PAIRS,
    },
    _metadata,
)
