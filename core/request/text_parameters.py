"""Kinds of request parameters that are texts, lists of texts, or token ids."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .json_fields import NUMBER, STRING, TOKEN_IDS, UINT32_MAX, FieldKind, invalid, one_or_list_of
from .parameters import ParameterKind, as_sampled, refusal

_TOKEN_ID = re.compile(r"(0|[1-9][0-9]{0,9})\Z")  # JSON's form of integers: one key per id


def _early_stopping() -> ParameterKind:
    """A text in the proto field; JSON bodies may have booleans."""
    texts = ("false", "true", "never")

    def read(value: Any, name: str) -> str:
        text = json.dumps(value)
        if text not in ("false", "true", '"never"'):
            raise invalid(name, "true, false or never")
        return text.strip('"')

    def check(value: str, name: str, vocab_size: int) -> str:
        if value not in texts:
            raise invalid(name, "true, false or never")
        return value

    schema = {"anyOf": [{"type": "boolean"}, {"const": "never"}]}
    return ParameterKind("true, false or `never`", FieldKind(schema, read), check)


EARLY_STOPPING = _early_stopping()


def text_like(pattern: str, description: str) -> ParameterKind:
    """A text that matches the whole pattern; `description`: the same in words."""

    def check(value: str, name: str, vocab_size: int) -> str:
        if not re.fullmatch(pattern, value):
            raise invalid(name, description)
        return value

    return ParameterKind(description, STRING.within(pattern=f"^{pattern}$"), check)


_LABEL_LIKE = "[!-~]{1,256}"
LABEL = text_like(_LABEL_LIKE, "1 to 256 visible ASCII characters")


def is_label(text: str) -> bool:
    """Whether a text is a valid label of a request: it is written to logs and headers unescaped."""
    return re.fullmatch(_LABEL_LIKE, text) is not None


def stop_strings(max_items: int, max_bytes: int) -> ParameterKind:
    """Texts of 1 to `max_bytes` bytes of UTF-8."""

    def check(value: Sequence[str], name: str, vocab_size: int) -> tuple[str, ...]:
        _check_length(value, max_items, name, "stop strings")
        for i, text in enumerate(value):
            if not 0 < len(text.encode()) <= max_bytes:
                raise refusal(f"{name}[{i}] must have 1 to {max_bytes} bytes", f"{name}[{i}]")
        return tuple(value)

    field = one_or_list_of(STRING.within(minLength=1, maxLength=max_bytes), max_items)
    return ParameterKind(f"{max_items} strings of 1 to {max_bytes} bytes", field, check)


def token_ids(max_items: int) -> ParameterKind:
    def check(value: Sequence[int], name: str, vocab_size: int) -> tuple[int, ...]:
        _check_length(value, max_items, name, "stop ids")
        check_in_vocabulary(value, vocab_size, name)
        return tuple(dict.fromkeys(value))

    return ParameterKind(f"{max_items} ids", TOKEN_IDS.within(maxItems=max_items), check)


def token_set() -> ParameterKind:
    """At least one id of the vocabulary: an empty list looks like an absent one in the proto
    field."""

    def read(value: Any, name: str) -> list[int]:
        found: list[int] = TOKEN_IDS.read(value, name)
        if not found:
            raise refusal(f"{name} is empty: no token could be chosen", name, "empty_array")
        return found

    def check(value: Sequence[int], name: str, vocab_size: int) -> tuple[int, ...]:
        _check_length(value, vocab_size, name, "ids, the size of the vocabulary")
        check_in_vocabulary(value, vocab_size, name)
        return tuple(sorted(set(value)))

    return ParameterKind(
        "1 id or more", FieldKind(TOKEN_IDS.within(minItems=1).schema, read), check
    )


def token_biases(max_items: int, most: float) -> ParameterKind:
    """Pairs of a token id and a float in [-most, most]."""
    interval = f"[-{most:g}, {most:g}]"

    def read(value: Any, name: str) -> dict[int, float]:
        if not isinstance(value, dict):
            raise invalid(name, "an object of token ids and numbers")
        _check_length(value, max_items, name, "biased tokens")
        found = {}
        for key, bias in value.items():
            if not _TOKEN_ID.match(key) or int(key) > UINT32_MAX:
                message = f"{name} names {key[:20]!r}, which is no token id"
                raise refusal(message, name, "invalid_token_id")
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise refusal(f"{name} must have numbers", name)
            found[int(key)] = NUMBER.read(bias, name)
        return found

    def check(
        value: Mapping[int, float], name: str, vocab_size: int
    ) -> tuple[tuple[int, float], ...]:
        _check_length(value, max_items, name, "biased tokens")
        biases = []
        for token_id, bias in sorted(value.items()):
            bias = as_sampled(bias, f"{name}[{token_id}]", name)
            if token_id >= vocab_size:
                message = f"{name} names token {token_id}; the vocabulary has {vocab_size} ids"
                raise refusal(message, name, "invalid_token_id")
            if not math.fabs(bias) <= most:
                raise refusal(f"{name}[{token_id}] must lie in {interval}, not {bias:g}", name)
            biases.append((token_id, bias))
        return tuple(biases)

    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": -most, "maximum": most},
        "maxProperties": max_items,
    }
    return ParameterKind(f"id -> {interval}, at most {max_items}", FieldKind(schema, read), check)


def check_in_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest naming the first id that is not in the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        position = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        param = f"{param}[{position}]"
        message = f"{param} is {token_ids[position]}; the vocabulary has {vocab_size} ids"
        raise refusal(message, param, "invalid_token_id")


def _check_length(items: Any, most: int, name: str, what: str) -> None:
    if len(items) > most:
        raise refusal(f"at most {most} {what}", name, "array_too_long")
