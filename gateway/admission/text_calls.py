"""Calls that need no engine: tokenise and detokenise."""

from __future__ import annotations

from collections.abc import Sequence

from ..security.caller import Caller
from ..text.special_tokens import Spans
from ..validation.validation import check_token_ids
from .front_door import FrontDoor


async def tokenize(
    door: FrontDoor,
    model: str,
    text: str,
    caller: Caller,
    *,
    adds_special_tokens: bool = True,
    special_at: Spans | None = None,
    param: str = "text",
) -> tuple[int, ...]:
    """Raises ModelNotFound, InvalidRequest, PermissionDenied, RateLimited."""
    with door.admitted(caller):
        door.check_model(caller, model)
        return await door.model.tokenizer.encode(
            text,
            adds_special_tokens=adds_special_tokens,
            special_at=special_at,
            max_tokens=door.limits.max_model_len,
            param=param,
        )


async def detokenize(
    door: FrontDoor, model: str, token_ids: Sequence[int], caller: Caller, *, param: str = "ids"
) -> str:
    """Raises ModelNotFound, InvalidRequest, PermissionDenied, RateLimited."""
    with door.admitted(caller):
        door.check_model(caller, model)
        check_token_ids(token_ids, door.model.limits.vocab_size, param)
        return await door.model.tokenizer.decode(
            token_ids, max_tokens=door.limits.max_model_len, param=param
        )
