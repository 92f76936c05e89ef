"""Requests as the validator leaves them, of what a test says of them."""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.request.request import Adapter, RequestOptions, SamplingParams
from baton.core.request.token_ids import column
from baton.gateway.validation.validation import ValidatedRequest


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
