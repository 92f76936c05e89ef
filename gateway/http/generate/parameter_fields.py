"""The table of request parameters as fields of JSON bodies: each by its kind.

Whether a value lies in its range is the validator's to judge, where the wire can carry it at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ....core.errors import InvalidRequest
from ....core.request.parameters import (
    UINT32_MAX,
    Count,
    Integer,
    Limit,
    LogitBias,
    Name,
    Number,
    Parameter,
    StopStrings,
    TokenIds,
)
from .json_fields import BOOLEAN, NUMBER, STRING, FieldKind, integer, invalid, one_or_list_of
from .prompts import TOKEN_IDS

_TOKEN_ID = re.compile(r"(0|[1-9][0-9]{0,9})\Z")  # as JSON writes integers: one id has one key


def fields_of(table: Mapping[str, Parameter]) -> Mapping[str, FieldKind]:
    """Those that HTTP bodies have by the same name and meaning."""
    return {name: field_of(one) for name, one in table.items() if not one.over_http}


def field_of(parameter: Parameter) -> FieldKind:
    """The parameter as a field; its help is the schema's description."""
    return _of_kind(parameter).within(description=parameter.help)


def _of_kind(parameter: Parameter) -> FieldKind:
    match parameter.kind:
        case Number(least, most, is_open):
            bound = "exclusiveMinimum" if is_open else "minimum"
            return NUMBER.within(**{bound: least, "maximum": most})
        case Limit():
            return _NO_LIMIT_BY_MINUS_ONE
        case Count(least, most):
            return integer(least, UINT32_MAX).within(maximum=most)
        case Integer(least, most):
            return integer(least, most)
        case StopStrings(max_items, max_bytes):
            return one_or_list_of(STRING.within(minLength=1, maxLength=max_bytes), max_items)
        case TokenIds(max_items):
            return TOKEN_IDS.within(maxItems=max_items)
        case LogitBias() as kind:
            return _logit_bias(kind)
        case Name(pattern):
            return STRING.within(pattern=f"^{pattern}$")
    return BOOLEAN


def _read_limit(value: Any, name: str) -> int:
    """-1 is how vLLM's clients write "no limit", which is 0 on our wire."""
    return max(0, int(_ANY_LIMIT.read(value, name)))


_ANY_LIMIT = integer(-1, UINT32_MAX)
_NO_LIMIT_BY_MINUS_ONE = FieldKind(_ANY_LIMIT.schema, _read_limit)


def _logit_bias(kind: LogitBias) -> FieldKind:
    def read(value: Any, name: str) -> dict[int, float]:
        if not isinstance(value, dict):
            raise invalid(name, "an object of token ids and numbers")
        if len(value) > kind.max_items:
            raise InvalidRequest(f"at most {kind.max_items} biased tokens", name, "array_too_long")
        return {_token_id(key, name): _bias(bias, name) for key, bias in value.items()}

    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": -kind.most, "maximum": kind.most},
        "maxProperties": kind.max_items,
    }
    return FieldKind(schema, read)


def _token_id(key: str, name: str) -> int:
    if not _TOKEN_ID.match(key) or int(key) > UINT32_MAX:
        message = f"{name} names {key[:20]!r}, which is no token id"
        raise InvalidRequest(message, name, "invalid_token_id")
    return int(key)


def _bias(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must have numbers", name, "invalid_value")
    return float(NUMBER.read(value, name))
