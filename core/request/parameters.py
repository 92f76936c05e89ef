"""Kinds of request parameters: flags and numbers, and `parameter`, which declares one. Kinds of
texts and token ids are in text_parameters.py.

The table itself is SamplingParams and RequestOptions in sampling_params.py, one field a parameter,
with the name of the proto message's field. Generated from it: the fields of HTTP bodies and OpenAPI
(gateway/http/generate/request_fields.py), the checks of both fronts (gateway/validation), the codec
(proto/codec.py), the steps between an engine's ranks, and the table in docs/sampling.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequest
from .json_fields import BOOLEAN, NUMBER, UINT32_MAX, FieldKind, integer

_SMALLEST = 2.0**-126  # smaller float32 are subnormal, and GPUs flush them to 0


@dataclass(frozen=True, slots=True)
class Kind:
    """`range`: for the documentation. `field`: the field of a JSON body, which checks only that the
    value fits the proto field.

    `check(value, name, vocab_size)`: used by both fronts. Returns the proto field's value in the
    form of SamplingParams, or raises InvalidRequest.
    """

    range: str
    field: FieldKind
    check: Callable[[Any, str, int], Any]


FLAG = Kind("", BOOLEAN, lambda value, name, vocab_size: value)


def number(least: float, most: float, *, is_open: bool = False) -> Kind:
    """A float in [least, most], or in (least, most] if `is_open`."""
    interval = f"{'(' if is_open else '['}{least:g}, {most:g}]"

    def check(value: float, name: str, vocab_size: int) -> float:
        value = as_sampled(value, name, name)
        # NaN compares false.
        if not least <= value <= most or (is_open and value == least):
            raise refusal(f"{name} must lie in {interval}, not {value:g}", name)
        return value

    bound = "exclusiveMinimum" if is_open else "minimum"
    return Kind(interval, NUMBER.within(**{bound: least, "maximum": most}), check)


def _within(least: int, most: float, must: str) -> Callable[[int, str, int], int]:
    """A check of an integer; `must`: the error text, which may contain `{value}`."""

    def check(value: int, name: str, vocab_size: int) -> int:
        if not least <= value <= most:
            raise refusal(f"{name} {must.format(value=value)}", name)
        return value

    return check


def at_least(least: int) -> Kind:
    """An integer from `least` on. The upper bound is that of the proto field; no message names
    it."""
    check = _within(least, math.inf, f"must be at least {least}")
    return Kind(f"{least} ...", integer(least, UINT32_MAX), check)


def between(least: int, most: int) -> Kind:
    """An integer in [least, most]."""
    interval = f"[{least}, {most}]"
    check = _within(least, most, f"must lie in {interval}, not {{value}}")
    return Kind(interval, integer(least, most), check)


def count(most: int) -> Kind:
    """The number of items to return. `most` is checked by `check`, for HTTP too."""
    check = _within(0, most, f"can be {most} at most, not {{value}}")
    return Kind(f"[0, {most}]", integer(0, UINT32_MAX).within(maximum=most), check)


def _limit() -> Kind:
    any_limit = integer(-1, UINT32_MAX)
    field = FieldKind(any_limit.schema, lambda value, name: max(0, any_limit.read(value, name)))
    return Kind("0 ...", field, lambda value, name, vocab_size: value or None)


LIMIT = _limit()  # may be unlimited: None here, 0 in the proto field, 0 or vLLM's -1 over HTTP


_MAX_SEED = 2**63 - 1
SEED = Kind("[0, 2**63)", integer(0, _MAX_SEED), _within(0, _MAX_SEED, "must lie in [0, 2**63)"))


def as_sampled(value: float, name: str, param: str) -> float:
    """The value that the sampler uses: 0 if it is too small for a float32. Raises for -0."""
    if math.fabs(value) >= _SMALLEST or math.isnan(value):
        return value
    if math.copysign(1.0, value) < 0:
        raise refusal(f"{name} is -0 or rounds to it: write 0", param)
    return 0.0


def refusal(message: str, param: str, code: str = "invalid_value") -> InvalidRequest:
    """The error for a bad value."""
    return InvalidRequest(message, param, code)


@dataclass(frozen=True, slots=True)
class Parameter:
    """`absent`: the meaning of an absent field, as text, if that is not `default`.

    `over_http`: the HTTP form, as text, if it has another name or meaning there.
    """

    default: Any
    kind: Kind
    help: str
    absent: str | None = None
    over_http: str = ""

    @property
    def field(self) -> FieldKind:
        """Its field in a JSON body."""
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
