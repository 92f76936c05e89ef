"""The part of the validator that reads parameters: each by its kind in the table of request.py.

The limits are vLLM's where it has some, and tighter where a public endpoint should be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message

from ...constraints.limits import MAX_CHOICES
from ...core.errors import InvalidRequest
from ...core.request.constraint import Constraint, ConstraintKind
from ...core.request.parameters import Parameter, check_in_vocabulary
from ...core.request.request import SAMPLING, SamplingParams
from ...proto.codec import constraint_from_wire, given_fields
from ...proto.v1 import common_pb2


def check_sampling(wire: common_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
    """Raises InvalidRequest. Absent fields have the defaults of SamplingParams."""
    given = check_parameters(wire, SAMPLING, vocab_size)
    sampling = SamplingParams(**given, constraint=_constraint(wire))
    if sampling.min_tokens and len(sampling.stop_token_ids) == vocab_size:
        raise InvalidRequest(
            "min_tokens leaves no token: all are stop ids", "min_tokens", "invalid_value"
        )
    return sampling


def check_parameters(
    wire: Message, table: Mapping[str, Parameter], vocab_size: int
) -> dict[str, Any]:
    """The values of the parameters that a message has. Raises InvalidRequest."""
    return {
        name: table[name].kind.check(value, name, vocab_size)
        for name, value in given_fields(wire, table).items()
    }


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest naming the first id that is not in the vocabulary."""
    if token_ids and np.max(token_ids) >= vocab_size:  # a column is read where it lies
        check_in_vocabulary(token_ids, vocab_size, param)


def _constraint(wire: common_pb2.SamplingParams) -> Constraint | None:
    """Whether it can be compiled is for constraint_check.py."""
    constraint = constraint_from_wire(wire)
    if constraint is None:
        return None
    if wire.ignore_eos:
        message = "ignore_eos cannot go with a constraint: EOS ends what matches"
        raise InvalidRequest(message, "ignore_eos", "invalid_value")
    if constraint.kind is ConstraintKind.CHOICE:
        _check_choices(wire.choice.values)
    elif not constraint.source:
        raise InvalidRequest("constraint is empty", "constraint", "invalid_schema")
    return constraint


def _check_choices(values: Sequence[str]) -> None:
    if len(values) > MAX_CHOICES:
        message = f"constraint has more than {MAX_CHOICES} choices"
        raise InvalidRequest(message, "constraint", "array_too_long")
    if not values or not all(values):
        message = "constraint must have choices, and none of them empty"
        raise InvalidRequest(message, "constraint", "invalid_schema")
