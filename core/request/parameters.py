"""What a request parameter can be: the kinds, and the `parameter` that makes a field one.

The table itself is SamplingParams and RequestOptions in request.py, one field a parameter, with
the name of the proto message's field. Made from it: the fields of HTTP bodies and OpenAPI
(gateway/http/generate/request_fields.py), the checks of both fronts (gateway/validation), the codec
(proto/codec.py), the steps between an engine's ranks, and the table in docs/sampling.md.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequest
from .json_fields import (
    BOOLEAN,
    NUMBER,
    STRING,
    TOKEN_IDS,
    UINT32_MAX,
    FieldKind,
    integer,
    invalid,
    one_or_list_of,
)

_SMALLEST = 2.0**-126  # below it a float32 has fewer digits, and GPUs take 0
_TOKEN_ID = re.compile(r"(0|[1-9][0-9]{0,9})\Z")  # as JSON writes integers: one id has one key


@dataclass(frozen=True, slots=True)
class Kind:
    """`range`: for people. `field`, of a JSON body, keeps to what the wire can carry alone.

    `check(value, name, vocab_size)`: of both fronts, gives the wire's value as SamplingParams has
    it, or raises InvalidRequest.
    """

    range: str
    field: FieldKind
    check: Callable[[Any, str, int], Any]


def _early_stopping() -> Kind:
    """A text on the wire; JSON has booleans too."""
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
    return Kind("true, false or `never`", FieldKind(schema, read), check)


EARLY_STOPPING = _early_stopping()
FLAG = Kind("", BOOLEAN, lambda value, name, vocab_size: value)


def number(least: float, most: float, *, is_open: bool = False) -> Kind:
    """A float in [least, most], or in (least, most] if `is_open`."""
    interval = f"{'(' if is_open else '['}{least:g}, {most:g}]"

    def check(value: float, name: str, vocab_size: int) -> float:
        value = _as_sampled(value, name, name)
        # NaN compares false.
        if not least <= value <= most or (is_open and value == least):
            raise _invalid(f"{name} must lie in {interval}, not {value:g}", name)
        return value

    bound = "exclusiveMinimum" if is_open else "minimum"
    return Kind(interval, NUMBER.within(**{bound: least, "maximum": most}), check)


def _within(least: int, most: float, refusal: str) -> Callable[[int, str, int], int]:
    """A check of integers; `refusal` says what one must be, and may name its `value`."""

    def check(value: int, name: str, vocab_size: int) -> int:
        if not least <= value <= most:
            raise _invalid(f"{name} {refusal.format(value=value)}", name)
        return value

    return check


def at_least(least: int) -> Kind:
    """An integer from `least` on; the bound above is the wire's, and stands in no message."""
    check = _within(least, math.inf, f"must be at least {least}")
    return Kind(f"{least} ...", integer(least, UINT32_MAX), check)


def between(least: int, most: int) -> Kind:
    """An integer in [least, most]."""
    interval = f"[{least}, {most}]"
    check = _within(least, most, f"must lie in {interval}, not {{value}}")
    return Kind(interval, integer(least, most), check)


def count(most: int) -> Kind:
    """How many of something to send; over HTTP too the check of both fronts has what is most."""
    check = _within(0, most, f"can be {most} at most, not {{value}}")
    return Kind(f"[0, {most}]", integer(0, UINT32_MAX).within(maximum=most), check)


def _limit() -> Kind:
    any_limit = integer(-1, UINT32_MAX)
    field = FieldKind(any_limit.schema, lambda value, name: max(0, any_limit.read(value, name)))
    return Kind("0 ...", field, lambda value, name, vocab_size: value or None)


LIMIT = _limit()  # a count that may be unlimited: None here, 0 on the wire, 0 or vLLM's -1 in HTTP


_MAX_SEED = 2**63 - 1
SEED = Kind("[0, 2**63)", integer(0, _MAX_SEED), _within(0, _MAX_SEED, "must lie in [0, 2**63)"))


def text_like(pattern: str, description: str) -> Kind:
    """A text that this pattern matches whole; `description`: which these are."""

    def check(value: str, name: str, vocab_size: int) -> str:
        if not re.fullmatch(pattern, value):
            raise invalid(name, description)
        return value

    return Kind(description, STRING.within(pattern=f"^{pattern}$"), check)


def stop_strings(max_items: int, max_bytes: int) -> Kind:
    """Texts of 1 to `max_bytes` bytes of UTF-8."""

    def check(value: Sequence[str], name: str, vocab_size: int) -> tuple[str, ...]:
        _check_length(value, max_items, name, "stop strings")
        for i, text in enumerate(value):
            if not 0 < len(text.encode()) <= max_bytes:
                raise _invalid(f"{name}[{i}] must have 1 to {max_bytes} bytes", f"{name}[{i}]")
        return tuple(value)

    field = one_or_list_of(STRING.within(minLength=1, maxLength=max_bytes), max_items)
    return Kind(f"{max_items} strings of 1 to {max_bytes} bytes", field, check)


def token_ids(max_items: int) -> Kind:
    """Ids of the vocabulary."""

    def check(value: Sequence[int], name: str, vocab_size: int) -> tuple[int, ...]:
        _check_length(value, max_items, name, "stop ids")
        check_in_vocabulary(value, vocab_size, name)
        return tuple(dict.fromkeys(value))

    return Kind(f"{max_items} ids", TOKEN_IDS.within(maxItems=max_items), check)


def token_biases(max_items: int, most: float) -> Kind:
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
                raise _invalid(message, name, "invalid_token_id")
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise _invalid(f"{name} must have numbers", name)
            found[int(key)] = NUMBER.read(bias, name)
        return found

    def check(
        value: Mapping[int, float], name: str, vocab_size: int
    ) -> tuple[tuple[int, float], ...]:
        _check_length(value, max_items, name, "biased tokens")
        biases = []
        for token_id, bias in sorted(value.items()):
            bias = _as_sampled(bias, f"{name}[{token_id}]", name)
            if token_id >= vocab_size:
                message = f"{name} names token {token_id}; the vocabulary has {vocab_size} ids"
                raise _invalid(message, name, "invalid_token_id")
            if not math.fabs(bias) <= most:
                raise _invalid(f"{name}[{token_id}] must lie in {interval}, not {bias:g}", name)
            biases.append((token_id, bias))
        return tuple(biases)

    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": -most, "maximum": most},
        "maxProperties": max_items,
    }
    return Kind(f"id -> {interval}, at most {max_items}", FieldKind(schema, read), check)


def _as_sampled(value: float, name: str, param: str) -> float:
    """As the sampler computes with it: what is too small for a float32 is 0; raises for -0."""
    if math.fabs(value) >= _SMALLEST or math.isnan(value):
        return value
    if math.copysign(1.0, value) < 0:
        raise _invalid(f"{name} is -0, or too small to be told from it: write 0", param)
    return 0.0


def check_in_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest naming the first id that is not in the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        position = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        param = f"{param}[{position}]"
        message = f"{param} is {token_ids[position]}; the vocabulary has {vocab_size} ids"
        raise _invalid(message, param, "invalid_token_id")


def _check_length(items: Any, most: int, name: str, what: str) -> None:
    if len(items) > most:
        raise _invalid(f"at most {most} {what}", name, "array_too_long")


def _invalid(message: str, param: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(message, param, code)


@dataclass(frozen=True, slots=True)
class Parameter:
    """`absent`: what an absent field means, as text, where that is not `default`.

    `over_http`: how HTTP bodies have it, as text, where not by the same name and meaning.
    """

    default: Any
    kind: Kind
    help: str
    absent: str | None = None
    over_http: str = ""

    @property
    def field(self) -> FieldKind:
        """Of a JSON body."""
        return self.kind.field.within(description=self.help)


def parameter(default: Any, kind: Kind, help: str, **more: str) -> Any:
    """A dataclass field that is a request parameter; `more`: see Parameter."""
    described = Parameter(default, kind, help, **more)
    return dataclasses.field(default=default, metadata={"parameter": described})


def parameters_of(table: type) -> Mapping[str, Parameter]:
    """The parameters among the fields of a dataclass, by name."""
    return {
        field.name: field.metadata["parameter"]
        for field in dataclasses.fields(table)
        if "parameter" in field.metadata
    }
