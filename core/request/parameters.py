"""What a request parameter can be: the kinds, and the `parameter` that makes a field one.

The table itself is SamplingParams and RequestOptions in request.py, one field a parameter, with
the name of the proto message's field. Made from it: the fields of HTTP bodies and OpenAPI
(gateway/http/generate/request_fields.py), the checks of both fronts (gateway/validation), the codec
(proto/codec.py), the steps between an engine's ranks, and the table in docs/sampling.md.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
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
    """`range`: for people. The field of a JSON body keeps to what the wire can carry alone, and the
    check of both fronts to the rest."""

    @property
    def range(self) -> str:
        return ""

    @property
    def field(self) -> FieldKind:
        return BOOLEAN

    def check(self, value: Any, name: str, vocab_size: int) -> Any:
        """The wire's value as SamplingParams has it. Raises InvalidRequest."""
        return value


class Flag(Kind):
    """True or false."""


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A float in [least, most], or in (least, most] if `is_open`."""

    least: float
    most: float
    is_open: bool = False

    @property
    def range(self) -> str:
        return f"{'(' if self.is_open else '['}{self.least:g}, {self.most:g}]"

    @property
    def field(self) -> FieldKind:
        bound = "exclusiveMinimum" if self.is_open else "minimum"
        return NUMBER.within(**{bound: self.least, "maximum": self.most})

    def check(self, value: float, name: str, vocab_size: int) -> float:
        value = _as_sampled(value, name, name)
        # NaN compares false.
        if not self.least <= value <= self.most or (self.is_open and value == self.least):
            raise _invalid(f"{name} must lie in {self.range}, not {value:g}", name)
        return value


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    """An integer in [least, most]; a bound that is the wire's alone is not spoken of."""

    least: int = 0
    most: int = UINT32_MAX

    @property
    def range(self) -> str:
        return f"[{self.least}, {self.most}]" if self.most < UINT32_MAX else f"{self.least} ..."

    @property
    def field(self) -> FieldKind:
        return integer(self.least, self.most)

    def check(self, value: int, name: str, vocab_size: int) -> int | None:
        if self.most == UINT32_MAX and value < self.least:
            raise _invalid(f"{name} must be at least {self.least}", name)
        if not self.least <= value <= self.most:
            raise _invalid(f"{name} must lie in {self.range}, not {value}", name)
        return value


class Count(Integer):
    """How many of something to send; over HTTP too the check of both fronts says what is most."""

    @property
    def field(self) -> FieldKind:
        return integer(self.least, UINT32_MAX).within(maximum=self.most)

    def check(self, value: int, name: str, vocab_size: int) -> int:
        if value > self.most:
            raise _invalid(f"{name} can be {self.most} at most, not {value}", name)
        return value


class Limit(Integer):
    """A count that may be unlimited: None here, 0 on the wire, 0 or vLLM's -1 over HTTP."""

    @property
    def field(self) -> FieldKind:
        any_limit = integer(-1, UINT32_MAX)
        return FieldKind(any_limit.schema, lambda value, name: max(0, any_limit.read(value, name)))

    def check(self, value: int, name: str, vocab_size: int) -> int | None:
        return value or None


class Seed(Kind):
    """An integer of 63 bits."""

    range = "[0, 2**63)"
    field = integer(0, 2**63 - 1)

    def check(self, value: int, name: str, vocab_size: int) -> int:
        if value >> 63:
            raise _invalid(f"{name} must lie in {self.range}", name)
        return value


@dataclass(frozen=True, slots=True)
class Name(Kind):
    """A text that this pattern matches whole; `words` says which these are."""

    pattern: str
    words: str

    @property
    def range(self) -> str:
        return self.words

    @property
    def field(self) -> FieldKind:
        return STRING.within(pattern=f"^{self.pattern}$")

    def check(self, value: str, name: str, vocab_size: int) -> str:
        if not re.fullmatch(self.pattern, value):
            raise invalid(name, self.words)
        return value


@dataclass(frozen=True, slots=True)
class StopStrings(Kind):
    max_items: int
    max_bytes: int

    @property
    def range(self) -> str:
        return f"{self.max_items} strings of 1 to {self.max_bytes} bytes"

    @property
    def field(self) -> FieldKind:
        text = STRING.within(minLength=1, maxLength=self.max_bytes)
        return one_or_list_of(text, self.max_items)

    def check(self, value: Sequence[str], name: str, vocab_size: int) -> tuple[str, ...]:
        _check_length(value, self.max_items, name, "stop strings")
        for i, text in enumerate(value):
            if not 0 < len(text.encode()) <= self.max_bytes:
                raise _invalid(f"{name}[{i}] must have 1 to {self.max_bytes} bytes", f"{name}[{i}]")
        return tuple(value)


@dataclass(frozen=True, slots=True)
class TokenIds(Kind):
    max_items: int

    @property
    def range(self) -> str:
        return f"{self.max_items} ids"

    @property
    def field(self) -> FieldKind:
        return TOKEN_IDS.within(maxItems=self.max_items)

    def check(self, value: Sequence[int], name: str, vocab_size: int) -> tuple[int, ...]:
        _check_length(value, self.max_items, name, "stop ids")
        check_in_vocabulary(value, vocab_size, name)
        return tuple(dict.fromkeys(value))


@dataclass(frozen=True, slots=True)
class LogitBias(Kind):
    """Pairs of a token id and a float in [-most, most]."""

    max_items: int
    most: float

    @property
    def range(self) -> str:
        return f"id -> [-{self.most:g}, {self.most:g}], at most {self.max_items}"

    @property
    def field(self) -> FieldKind:
        schema = {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": -self.most, "maximum": self.most},
            "maxProperties": self.max_items,
        }
        return FieldKind(schema, self._read)

    def _read(self, value: Any, name: str) -> dict[int, float]:
        if not isinstance(value, dict):
            raise invalid(name, "an object of token ids and numbers")
        _check_length(value, self.max_items, name, "biased tokens")
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
        self, value: Mapping[int, float], name: str, vocab_size: int
    ) -> tuple[tuple[int, float], ...]:
        _check_length(value, self.max_items, name, "biased tokens")
        biases = []
        for token_id, bias in sorted(value.items()):
            bias = _as_sampled(bias, f"{name}[{token_id}]", name)
            if token_id >= vocab_size:
                message = f"{name} names token {token_id}; the vocabulary has {vocab_size} ids"
                raise _invalid(message, name, "invalid_token_id")
            if not math.fabs(bias) <= self.most:
                within = f"[-{self.most:g}, {self.most:g}]"
                raise _invalid(f"{name}[{token_id}] must lie in {within}, not {bias:g}", name)
            biases.append((token_id, bias))
        return tuple(biases)


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
    """`absent`: what an absent field means, in words, where that is not `default`.

    `over_http`: how HTTP bodies have it, in words, where not by the same name and meaning.
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
