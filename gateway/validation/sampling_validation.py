"""The part of the validator that reads sampling parameters: ranges, counts, ids of the vocabulary.

The limits are vLLM's where it has some, and tighter where a public endpoint should be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...constraints.limits import MAX_CHOICES
from ...core.errors import InvalidRequest
from ...core.request.constraint import Constraint, ConstraintKind
from ...core.request.request import SamplingParams
from ...proto.codec import constraint_from_wire
from ...proto.v1 import common_pb2

MAX_STOP_STRINGS = 4
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 256
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BIAS = 100.0
_SMALLEST = float(np.finfo(np.float32).tiny)  # below it a float32 has fewer digits, and GPUs take 0


def check_sampling(wire: common_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
    """All but `max_tokens` and `seed`, whose defaults are not known yet. Raises InvalidRequest."""
    stop_token_ids = _stop_token_ids(wire.stop_token_ids, vocab_size)
    if wire.min_tokens and len(stop_token_ids) == vocab_size:
        raise InvalidRequest(
            "min_tokens leaves no token: all are stop ids", param="min_tokens", code="invalid_value"
        )
    return SamplingParams(
        temperature=_within(wire, "temperature", 0.0, MAX_TEMPERATURE, default=1.0),
        top_p=_within(wire, "top_p", 0.0, 1.0, default=1.0, is_open=True),
        # An explicit 0 means "no limit", as clients of other servers know it.
        top_k=wire.top_k if wire.HasField("top_k") and wire.top_k else None,
        min_p=_within(wire, "min_p", 0.0, 1.0, default=0.0),
        repetition_penalty=_within(
            wire, "repetition_penalty", 0.0, MAX_PENALTY, default=1.0, is_open=True
        ),
        presence_penalty=_within(wire, "presence_penalty", -MAX_PENALTY, MAX_PENALTY, default=0.0),
        frequency_penalty=_within(
            wire, "frequency_penalty", -MAX_PENALTY, MAX_PENALTY, default=0.0
        ),
        logit_bias=_logit_bias(wire, vocab_size),
        stop=_stop(wire.stop),
        stop_token_ids=stop_token_ids,
        ignore_eos=wire.ignore_eos,
        min_tokens=wire.min_tokens,
        logprobs=_logprobs(wire, "logprobs"),
        prompt_logprobs=_logprobs(wire, "prompt_logprobs"),
        constraint=_constraint(wire),
    )


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest naming the first id that is not in the vocabulary."""
    if token_ids and np.max(token_ids) >= vocab_size:  # a column is read where it lies
        position = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise InvalidRequest(
            f"{param}[{position}] is {token_ids[position]}; the vocabulary has {vocab_size} ids",
            param=f"{param}[{position}]",
            code="invalid_token_id",
        )


def _within(
    wire: common_pb2.SamplingParams,
    name: str,
    least: float,
    most: float,
    *,
    default: float,
    is_open: bool = False,
) -> float:
    """A number in [least, most], or in (least, most] if `is_open`."""
    value = _number(getattr(wire, name), name, name) if wire.HasField(name) else default
    if not least <= value <= most or (is_open and value == least):  # NaN compares false
        bracket = "(" if is_open else "["
        raise InvalidRequest(
            f"{name} must lie in {bracket}{least:g}, {most:g}], not {value:g}",
            param=name,
            code="invalid_value",
        )
    return value


def _number(value: float, name: str, param: str) -> float:
    """As the sampler computes with it: what is too small for a float32 is 0; raises for -0."""
    if math.fabs(value) >= _SMALLEST or math.isnan(value):
        return value
    if math.copysign(1.0, value) < 0:
        raise InvalidRequest(
            f"{name} is -0, or too small to be told from it: write 0",
            param=param,
            code="invalid_value",
        )
    return 0.0


def _logit_bias(wire: common_pb2.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(wire.logit_bias) > MAX_BIASES:
        raise InvalidRequest(
            f"at most {MAX_BIASES} biased tokens", param="logit_bias", code="array_too_long"
        )
    biases = tuple(
        (token_id, _number(bias, f"logit_bias[{token_id}]", "logit_bias"))
        for token_id, bias in sorted(wire.logit_bias.items())
    )
    for token_id, bias in biases:
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token_id}; the vocabulary has {vocab_size} ids",
                param="logit_bias",
                code="invalid_token_id",
            )
        if not math.fabs(bias) <= MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias[{token_id}] must lie in [-{MAX_BIAS:g}, {MAX_BIAS:g}], not {bias:g}",
                param="logit_bias",
                code="invalid_value",
            )
    return biases


def _logprobs(wire: common_pb2.SamplingParams, name: str) -> int | None:
    if not wire.HasField(name):
        return None
    value: int = getattr(wire, name)
    if value > MAX_LOGPROBS:
        raise InvalidRequest(
            f"{name} can be {MAX_LOGPROBS} at most, not {value}", param=name, code="invalid_value"
        )
    return value


def _constraint(wire: common_pb2.SamplingParams) -> Constraint | None:
    """Whether it can be compiled is constraint_check.py's to say."""
    constraint = constraint_from_wire(wire)
    if constraint is None:
        return None
    if wire.ignore_eos:
        raise InvalidRequest(
            "ignore_eos cannot go with a constraint: EOS ends what matches",
            param="ignore_eos",
            code="invalid_value",
        )
    if constraint.kind is ConstraintKind.CHOICE:
        _check_choices(wire.choice.values)
    elif not constraint.source:
        raise InvalidRequest("constraint is empty", param="constraint", code="invalid_schema")
    return constraint


def _check_choices(values: Sequence[str]) -> None:
    if len(values) > MAX_CHOICES:
        raise InvalidRequest(
            f"constraint has more than {MAX_CHOICES} choices",
            param="constraint",
            code="array_too_long",
        )
    if not values or not all(values):
        raise InvalidRequest(
            "constraint must have choices, and none of them empty",
            param="constraint",
            code="invalid_schema",
        )


def _stop(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"at most {MAX_STOP_STRINGS} stop strings", param="stop", code="array_too_long"
        )
    for i, text in enumerate(stop):
        if not 0 < len(text.encode()) <= MAX_STOP_BYTES:
            raise InvalidRequest(
                f"stop[{i}] must have 1 to {MAX_STOP_BYTES} bytes",
                param=f"stop[{i}]",
                code="invalid_value",
            )
    return tuple(stop)


def _stop_token_ids(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"at most {MAX_STOP_TOKEN_IDS} stop ids", param="stop_token_ids", code="array_too_long"
        )
    check_token_ids(token_ids, vocab_size, "stop_token_ids")
    return tuple(dict.fromkeys(token_ids))
