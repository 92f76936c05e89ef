"""Kinds of request parameters: flags and numbers. Kinds of texts and token ids are in
text_parameters.py; the table of the parameters themselves is in sampling_params.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequest
from .json_fields import BOOLEAN, NUMBER, UINT32_MAX, FieldKind, integer

_SMALLEST = 2.0**-126  # smaller float32 are subnormal, and GPUs flush them to 0


@dataclass(frozen=True, slots=True)
class ParameterKind:
    """`range`: for the documentation. `field`: the field of a JSON body, which checks only that the
    value fits the proto field.

    `check(value, name, vocab_size)`: used by both fronts. Returns the proto field's value in the
    form of SamplingParams, or raises InvalidRequest.
    """

    range: str
    field: FieldKind
    check: Callable[[Any, str, int], Any]


FLAG = ParameterKind("", BOOLEAN, lambda value, name, vocab_size: value)


def number(least: float, most: float, *, is_open: bool = False) -> ParameterKind:
    """A float in [least, most], or in (least, most] if `is_open`."""
    interval = f"{'(' if is_open else '['}{least:g}, {most:g}]"

    def check(value: float, name: str, vocab_size: int) -> float:
        value = as_sampled(value, name, name)
        # NaN compares false.
        if not least <= value <= most or (is_open and value == least):
            raise refusal(f"{name} must lie in {interval}, not {value:g}", name)
        return value

    bound = "exclusiveMinimum" if is_open else "minimum"
    return ParameterKind(interval, NUMBER.within(**{bound: least, "maximum": most}), check)


def _integer(least: int, most: float, field: FieldKind, range: str, must: str) -> ParameterKind:
    """An integer in [least, most]; `must`: the error text, which may contain `{value}`."""

    def check(value: int, name: str, vocab_size: int) -> int:
        if not least <= value <= most:
            raise refusal(f"{name} {must.format(value=value)}", name)
        return value

    return ParameterKind(range, field, check)


def at_least(least: int) -> ParameterKind:
    """An integer from `least` on, up to the bound of the proto field, which no message names."""
    field = integer(least, UINT32_MAX)
    return _integer(least, math.inf, field, f"{least} ...", f"must be at least {least}")


def between(least: int, most: int) -> ParameterKind:
    interval = f"[{least}, {most}]"
    must = f"must lie in {interval}, not {{value}}"
    return _integer(least, most, integer(least, most), interval, must)


def count(most: int) -> ParameterKind:
    """The number of items to return. `most` is checked by `check`, for HTTP too."""
    field = integer(0, UINT32_MAX).within(maximum=most)
    return _integer(0, most, field, f"[0, {most}]", f"can be {most} at most, not {{value}}")


_MAX_SEED = 2**63 - 1
SEED = _integer(0, _MAX_SEED, integer(0, _MAX_SEED), "[0, 2**63)", "must lie in [0, 2**63)")

# May be unlimited: None here, 0 in the proto field, 0 or vLLM's -1 over HTTP.
_ANY_LIMIT = integer(-1, UINT32_MAX)
LIMIT = ParameterKind(
    "0 ...",
    FieldKind(_ANY_LIMIT.schema, lambda value, name: max(0, _ANY_LIMIT.read(value, name))),
    lambda value, name, vocab_size: value or None,
)


def as_sampled(value: float, name: str, param: str) -> float:
    """The value that the sampler uses: 0 if it is too small for a float32. Raises for -0."""
    if math.fabs(value) >= _SMALLEST or math.isnan(value):
        return value
    if math.copysign(1.0, value) < 0:
        raise refusal(f"{name} is -0 or rounds to it: write 0", param)
    return 0.0


def refusal(message: str, param: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(message, param, code)
