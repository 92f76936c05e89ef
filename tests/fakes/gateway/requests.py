"""Validated requests: built directly from a test's arguments, or by the validator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from baton.core.request.request import Adapter
from baton.core.request.sampling_params import RequestOptions, SamplingParams
from baton.core.request.token_ids import column
from baton.gateway.validation.served_model import ModelLimits
from baton.gateway.validation.validation import ValidatedRequest, validated
from baton.proto.v1 import inference_pb2


def valid(
    prompt: Iterable[int] = (1,),
    *,
    cache_salt: str = "",
    caller_id: int = 0,
    adapter: Adapter | None = None,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
) -> ValidatedRequest:
    options = RequestOptions(cache_salt=cache_salt)
    return ValidatedRequest(
        column(prompt), sampling, "", options, caller_id=caller_id, adapter=adapter
    )


def validated_at_once(
    wire: inference_pb2.GenerateRequest,
    limits: ModelLimits,
    encode: Callable[[str], Sequence[int]],
    *,
    drawn_seed: int = 1,
) -> ValidatedRequest:
    """Validate with a tokenizer that returns at once, for any output format."""

    async def encoded(text: str, **_: object) -> Sequence[int]:
        return encode(text)

    tokenizer: Any = SimpleNamespace(encode=encoded)
    try:
        validated(wire, limits, tokenizer, drawn_seed=drawn_seed).send(None)
    except StopIteration as done:
        request: ValidatedRequest = done.value
        return request
    raise AssertionError("it waits for something")
