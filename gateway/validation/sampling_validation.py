"""The part of the validator that reads parameters: each by its kind in the table of request.py.

The limits are vLLM's where it has some, and tighter where a public endpoint should be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message

from ...constraints.limits import MAX_CHOICES
from ...core.errors import InvalidRequest
from ...core.request.constraint import Constraint, ConstraintKind
from ...core.request.parameters import (
    UINT32_MAX,
    Count,
    Integer,
    Kind,
    Limit,
    LogitBias,
    Name,
    Number,
    Parameter,
    Seed,
    StopStrings,
    TokenIds,
)
from ...core.request.request import SAMPLING, SamplingParams
from ...proto.codec import constraint_from_wire, given_fields
from ...proto.v1 import common_pb2

_SMALLEST = float(np.finfo(np.float32).tiny)  # below it a float32 has fewer digits, and GPUs take 0


def check_sampling(wire: common_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
    """Raises InvalidRequest. Absent fields have the defaults of SamplingParams."""
    given = check_parameters(wire, SAMPLING, vocab_size)
    sampling = SamplingParams(**given, constraint=_constraint(wire))
    if sampling.min_tokens and len(sampling.stop_token_ids) == vocab_size:
        raise _invalid("min_tokens leaves no token: all are stop ids", "min_tokens")
    return sampling


def check_parameters(
    wire: Message, table: Mapping[str, Parameter], vocab_size: int
) -> dict[str, Any]:
    """The values of the parameters that a message has. Raises InvalidRequest."""
    return {
        name: _checked(value, name, table[name].kind, vocab_size)
        for name, value in given_fields(wire, table).items()
    }


def _checked(value: Any, name: str, kind: Kind, vocab_size: int) -> Any:
    match kind:
        case Number():
            return _number(value, name, kind)
        case Limit():
            return value or None
        case Integer():
            return _integer(value, name, kind)
        case LogitBias():
            return _logit_bias(value, name, kind, vocab_size)
        case StopStrings():
            return _stop(value, name, kind)
        case TokenIds():
            _check_length(value, kind.max_items, name, "stop ids")
            check_token_ids(value, vocab_size, name)
            return tuple(dict.fromkeys(value))
        case Name():
            if not re.fullmatch(kind.pattern, value):
                raise _invalid(f"{name} must be {kind.range}", name)
    return value


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest naming the first id that is not in the vocabulary."""
    if token_ids and np.max(token_ids) >= vocab_size:  # a column is read where it lies
        position = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise _invalid(
            f"{param}[{position}] is {token_ids[position]}; the vocabulary has {vocab_size} ids",
            f"{param}[{position}]",
            "invalid_token_id",
        )


def _number(value: float, name: str, kind: Number) -> float:
    value = _as_sampled(value, name, name)
    # NaN compares false.
    if not kind.least <= value <= kind.most or (kind.is_open and value == kind.least):
        raise _invalid(f"{name} must lie in {kind.range}, not {value:g}", name)
    return value


def _as_sampled(value: float, name: str, param: str) -> float:
    """As the sampler computes with it: what is too small for a float32 is 0; raises for -0."""
    if math.fabs(value) >= _SMALLEST or math.isnan(value):
        return value
    if math.copysign(1.0, value) < 0:
        raise _invalid(f"{name} is -0, or too small to be told from it: write 0", param)
    return 0.0


def _integer(value: int, name: str, kind: Integer) -> int:
    if isinstance(kind, Count) and value > kind.most:
        raise _invalid(f"{name} can be {kind.most} at most, not {value}", name)
    if kind.most == UINT32_MAX and value < kind.least:
        raise _invalid(f"{name} must be at least {kind.least}", name)
    if not kind.least <= value <= kind.most:
        shown = "" if isinstance(kind, Seed) else f", not {value}"
        raise _invalid(f"{name} must lie in {kind.range}{shown}", name)
    return value


def _logit_bias(
    given: Mapping[int, float], name: str, kind: LogitBias, vocab_size: int
) -> tuple[tuple[int, float], ...]:
    _check_length(given, kind.max_items, name, "biased tokens")
    biases = tuple(
        (token_id, _as_sampled(bias, f"{name}[{token_id}]", name))
        for token_id, bias in sorted(given.items())
    )
    for token_id, bias in biases:
        if token_id >= vocab_size:
            raise _invalid(
                f"{name} names token {token_id}; the vocabulary has {vocab_size} ids",
                name,
                "invalid_token_id",
            )
        if not math.fabs(bias) <= kind.most:
            within = f"[-{kind.most:g}, {kind.most:g}]"
            raise _invalid(f"{name}[{token_id}] must lie in {within}, not {bias:g}", name)
    return biases


def _stop(stop: Sequence[str], name: str, kind: StopStrings) -> tuple[str, ...]:
    _check_length(stop, kind.max_items, name, "stop strings")
    for i, text in enumerate(stop):
        if not 0 < len(text.encode()) <= kind.max_bytes:
            raise _invalid(f"{name}[{i}] must have 1 to {kind.max_bytes} bytes", f"{name}[{i}]")
    return tuple(stop)


def _check_length(items: Any, most: int, name: str, what: str) -> None:
    if len(items) > most:
        raise _invalid(f"at most {most} {what}", name, "array_too_long")


def _constraint(wire: common_pb2.SamplingParams) -> Constraint | None:
    """Whether it can be compiled is for constraint_check.py."""
    constraint = constraint_from_wire(wire)
    if constraint is None:
        return None
    if wire.ignore_eos:
        message = "ignore_eos cannot go with a constraint: EOS ends what matches"
        raise _invalid(message, "ignore_eos")
    if constraint.kind is ConstraintKind.CHOICE:
        _check_choices(wire.choice.values)
    elif not constraint.source:
        raise _invalid("constraint is empty", "constraint", "invalid_schema")
    return constraint


def _check_choices(values: Sequence[str]) -> None:
    if len(values) > MAX_CHOICES:
        message = f"constraint has more than {MAX_CHOICES} choices"
        raise _invalid(message, "constraint", "array_too_long")
    if not values or not all(values):
        message = "constraint must have choices, and none of them empty"
        raise _invalid(message, "constraint", "invalid_schema")


def _invalid(message: str, param: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(message, param, code)
