"""Conversion between protobuf messages and the values of core/.

Decoding does not trust its input: an unknown enum value or a missing field raises InvalidRequest.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Container, Sequence
from typing import Any

from google.protobuf.message import Message

from ..core import errors
from ..core.errors import BatonError, InvalidRequest
from ..core.request.constraint import Constraint, ConstraintKind
from ..core.request.request import (
    Adapter,
    FinishReason,
    PrefixSource,
    Request,
    Ticket,
    TokenLogprobs,
)
from ..core.request.sampling_params import SAMPLING, SamplingParams
from ..core.request.timeline import Event, Stamp
from ..core.request.token_ids import column, pack
from .v1 import common_pb2, node_pb2

FINISH_TO_WIRE = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,  # not finished
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
FINISH_FROM_WIRE = {int(wire): reason for reason, wire in FINISH_TO_WIRE.items()}


def error_to_wire(error: BatonError) -> common_pb2.Error:
    return common_pb2.Error(code=error.code, message=error.message, param=error.param or "")


def error_from_wire(wire: common_pb2.Error) -> BatonError:
    return errors.from_code(wire.code, wire.message, wire.param or None)


def sampling_to_wire(sampling: SamplingParams) -> common_pb2.SamplingParams:
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in SAMPLING}
    wire = common_pb2.SamplingParams(**fields | {"logit_bias": dict(sampling.logit_bias)})
    if (constraint := sampling.constraint) is None:
        return wire
    if constraint.kind is ConstraintKind.CHOICE:
        wire.choice.values.extend(json.loads(constraint.source))
    else:
        setattr(wire, constraint.kind.value, constraint.source)
    return wire


def sampling_from_wire(wire: common_pb2.SamplingParams) -> SamplingParams:
    """Decode the parameters of a dispatch. Public requests are validated before."""
    fields = given(wire, SAMPLING) | {
        "stop": tuple(wire.stop),
        "stop_token_ids": tuple(wire.stop_token_ids),
        "allowed_token_ids": tuple(wire.allowed_token_ids),
        "logit_bias": tuple(sorted(wire.logit_bias.items())),
    }
    return SamplingParams(**fields, constraint=constraint_from_wire(wire))


def given(wire: Message, table: Container[str]) -> dict[str, Any]:
    """The values of the fields that are set and in the table."""
    return {field.name: value for field, value in wire.ListFields() if field.name in table}


def same_fields(source: Any, target: Any) -> dict[str, Any]:
    """The source's values of the fields that the target has too, by name. One of them is a message,
    the other a dataclass."""
    return {name: getattr(source, name) for name in _names(source) & _names(target)}


def _names(holder: Any) -> set[str]:
    is_message = hasattr(holder, "DESCRIPTOR")
    return set(holder.DESCRIPTOR.fields_by_name if is_message else holder.__dataclass_fields__)


def constraint_from_wire(wire: common_pb2.SamplingParams) -> Constraint | None:
    """The constraint on the output, not validated."""
    name = wire.WhichOneof("constraint")
    if name is None:
        return None
    if name == "choice":
        return Constraint.choice(wire.choice.values)
    return Constraint(ConstraintKind(name), getattr(wire, name))


def logprobs_to_wire(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_from_wire(wire: common_pb2.TokenLogprobs) -> TokenLogprobs:
    """Raises InvalidRequest if the numbers of ids and log-probabilities differ."""
    if len(wire.top_ids) != len(wire.top_logprobs):
        raise InvalidRequest("a token's log-probabilities do not match their ids")
    return TokenLogprobs(wire.logprob, tuple(zip(wire.top_ids, wire.top_logprobs, strict=True)))


def token_ids_from_wire(packed: bytes) -> array[int]:
    """The reverse of `pack`. Raises InvalidRequest for an incomplete id."""
    token_ids = column()
    try:
        token_ids.frombytes(packed)
    except ValueError as error:
        raise InvalidRequest("packed token ids are cut off", "prompt", "invalid_value") from error
    return token_ids


def dispatch_to_wire(
    request: Request, ticket: Ticket | None, deadline_remaining_s: float
) -> node_pb2.Dispatch:
    source, adapter = request.prefix_source, request.adapter
    fields = same_fields(request, node_pb2.Dispatch) | {
        "prompt_token_ids": pack(request.prompt_token_ids),
        "output_token_ids": pack(request.output_token_ids),
        "sampling": sampling_to_wire(request.sampling),
        "deadline_remaining_us": _microseconds(deadline_remaining_s),
        "fork_request_ids": request.fork_ids,
        "ticket": ticket and node_pb2.Ticket(**same_fields(ticket, node_pb2.Ticket)),
        "adapter": adapter and node_pb2.Adapter(**same_fields(adapter, node_pb2.Adapter)),
        "prefix_source": source
        and node_pb2.PrefixSource(
            **same_fields(source, node_pb2.PrefixSource), limit_us=_microseconds(source.limit_s)
        ),
    }
    return node_pb2.Dispatch(**fields)


def _microseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e6))


def request_from_wire(wire: node_pb2.Dispatch) -> Request:
    """The request of a dispatch. Raises InvalidRequest if it has no prompt or id."""
    if not wire.request_id or not wire.prompt_token_ids:
        raise InvalidRequest("a dispatch needs a request id and a prompt")
    fields = same_fields(wire, Request) | {
        "prompt_token_ids": token_ids_from_wire(wire.prompt_token_ids),
        "output_token_ids": token_ids_from_wire(wire.output_token_ids),
        "sampling": sampling_from_wire(wire.sampling),
        "fork_ids": tuple(wire.fork_request_ids),
        "prefix_source": None,
        "adapter": None,
    }
    if wire.HasField("adapter"):
        fields["adapter"] = Adapter(**same_fields(wire.adapter, Adapter))
    if wire.HasField("prefix_source"):
        source = wire.prefix_source
        limit_s = source.limit_us / 1e6
        fields["prefix_source"] = PrefixSource(source.incarnation, source.num_blocks, limit_s)
    return Request(**fields)


def stamps_to_wire(stamps: Sequence[Stamp]) -> list[common_pb2.TimelineEvent]:
    return [
        common_pb2.TimelineEvent(event=s.event.value, unix_ns=s.unix_ns, node=s.node)
        for s in stamps
    ]


def stamps_from_wire(wire: Sequence[common_pb2.TimelineEvent]) -> list[Stamp]:
    """Raises InvalidRequest for a name that is not in core/request/timeline.py."""
    return [Stamp(event_from_wire(e.event), e.unix_ns, e.node) for e in wire]


def event_from_wire(name: str) -> Event:
    """Raises InvalidRequest."""
    try:
        return Event(name)
    except ValueError as error:
        raise InvalidRequest(f"unknown timeline event: {error}") from error
