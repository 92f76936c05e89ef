"""What `generate` takes and gives, for both clients: its parameters, the request that they make,
chunks and results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number, Real
from typing import Any, TypedDict

from google.protobuf.message import Message

from ..core.errors import InvalidRequest
from ..core.metrics import TokenTimes
from ..core.request.constraint import ConstraintKind
from ..core.request.request import FinishReason, TokenLogprobs
from ..core.request.timeline import Stamp
from ..core.request.token_ids import pack
from ..proto.v1 import inference_pb2

# Parameters that are fields of GenerateRequest itself; all others are fields of its `sampling`.
_OWN_FIELDS = frozenset(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) - {
    *("text", "token_ids", "sampling")
}
_CONSTRAINTS = tuple(kind.value for kind in ConstraintKind)
_MAX_TIMEOUT_S = 365 * 86400.0


class GenerateParams(TypedDict, total=False):
    """Keyword arguments of `generate`; an absent one has the server's default.

    Those from `max_tokens` to `cache_salt` are the table of core/request/sampling_params.py;
    docs/sampling.md has their ranges, defaults and meanings.
    """

    prompt_token_ids: Sequence[int]  # instead of the prompt's text
    model: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]  # at least one
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    tbt_target_ms: float
    speculative: bool
    use_beam_search: bool
    best_of: int
    length_penalty: float
    early_stopping: bool | str  # or "never"
    num_beam_groups: int
    diversity_penalty: float
    json_schema: str | Mapping[str, Any]  # a constraint on the output: one of these four
    regex: str
    choice: Sequence[str]
    grammar: str
    n: int
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    add_special_tokens: bool
    cache_salt: str
    timeout_s: float
    request_id: str  # a label for abort() and logs


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of a sample, from position `index` of its output on. The last chunk of the
    sample has the `finish_reason`. `logprobs`: parallel to the tokens if requested, else empty."""

    text: str
    token_ids: tuple[int, ...]
    index: int
    finish_reason: FinishReason | None
    sample_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A finished sample: its output, the nodes that served it, and when each token arrived, by the
    client's clock. `prompt_logprobs`: of the prompt's tokens from the second one on, with sample 0
    only, if requested."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: int | str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prefill_node: str
    decode_node: str | None
    transfer_bytes: int
    transfer_cached_tokens: int
    transport: str | None
    attempts: int
    seed: int
    timeline: tuple[Stamp, ...]
    times: TokenTimes
    sample_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


def build_request(
    prompt: str | None, params: GenerateParams
) -> tuple[inference_pb2.GenerateRequest, float | None]:
    """The request and its timeout in seconds. Raises InvalidRequest for an impossible value."""
    fields: dict[str, Any] = {name: value for name, value in params.items() if value is not None}
    prompt_token_ids = fields.pop("prompt_token_ids", None)
    if prompt is not None and prompt_token_ids is not None:
        raise InvalidRequest("give the prompt as text or as token ids, not both", "prompt")
    timeout_s = timeout_of(fields.pop("timeout_s", None))
    if isinstance(stop := fields.get("stop"), str):
        fields["stop"] = [stop]
    if isinstance(is_early := fields.get("early_stopping"), bool):
        fields["early_stopping"] = json.dumps(is_early)
    request = inference_pb2.GenerateRequest()
    if not fields.keys().isdisjoint(_CONSTRAINTS):
        _set_constraint(request, fields)
    for name, value in fields.items():
        set_field(request if name in _OWN_FIELDS else request.sampling, name, value)
    if "allowed_token_ids" in fields and not request.sampling.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids is empty", "allowed_token_ids", "empty_array")
    if prompt is not None:
        if not isinstance(prompt, str):
            raise InvalidRequest("a prompt is text; ids go as prompt_token_ids", "prompt")
        set_field(request, "text", prompt, param="prompt")
    if isinstance(prompt_token_ids, bytes | bytearray):
        raise InvalidRequest("a prompt is text or token ids, no bytes", "prompt")
    if prompt_token_ids is not None:
        try:
            request.token_ids.packed = pack(prompt_token_ids)
        except (TypeError, OverflowError) as error:
            raise _cannot_be("prompt", prompt_token_ids, error) from error
    return request, timeout_s


def _set_constraint(request: inference_pb2.GenerateRequest, fields: dict[str, Any]) -> None:
    """Check that `fields` has one constraint at most. Sets `choice`, whose field is a message, and
    leaves the others in `fields`, as text."""
    if isinstance(schema := fields.get("json_schema"), Mapping):
        try:
            fields["json_schema"] = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise _cannot_be("json_schema", schema, error) from error
    constraints = [name for name in _CONSTRAINTS if fields.get(name)]
    if len(constraints) > 1:
        message = f"a request has one constraint, not {' and '.join(constraints)}"
        raise InvalidRequest(message, constraints[1])
    for name in set(_CONSTRAINTS).difference(constraints) if constraints else ():
        fields.pop(name, None)  # an empty constraint counts as absent
    if (choice := fields.pop("choice", None)) is not None:
        set_field(request.sampling.choice, "values", choice, param="choice")


def timeout_of(value: Any) -> float | None:
    """A timeout that gRPC can take: too large a number would count as a deadline in the past."""
    if value is None or value == math.inf:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise InvalidRequest(f"timeout_s cannot be {value!r:.100}: it is a number", "timeout_s")
    return min(float(value), _MAX_TIMEOUT_S)


def set_field(message: Message, name: str, value: Any, param: str | None = None) -> None:
    """Set a field. Raises InvalidRequest for a value of the wrong type or range."""
    if name not in message.DESCRIPTOR.fields_by_name:
        raise TypeError(f"generate() has no parameter {name!r}")
    try:
        if isinstance(value, str | Number):
            setattr(message, name, value)
        elif isinstance(value, Mapping):
            getattr(message, name).update(value)
        else:
            getattr(message, name).extend(value)
    except (TypeError, ValueError, AttributeError) as error:
        raise _cannot_be(param or name, value, error) from error


def _cannot_be(param: str, value: Any, error: Exception) -> InvalidRequest:
    return InvalidRequest(f"{param} cannot be {value!r:.100}: {error}", param)
