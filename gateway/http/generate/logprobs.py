"""Log-probabilities in the three shapes that clients know: completions', chat's, and vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....core.request.logprobs import TokenLogprobs
from ...text.token_text import TokenText

TokenOf = Callable[[int], TokenText]


def completion_logprobs(
    token_ids: Sequence[int],
    scores: Sequence[TokenLogprobs | None],
    token_of: TokenOf,
    first_offset: int,
) -> dict[str, Any]:
    """/v1/completions: four lists, one item a token; the first token of a prompt has no score.

    `top_logprobs` hold the token itself beside the likeliest, equals by name once.
    `first_offset`: where in the text the first token begins, in characters.
    """
    tokens = [token_of(token_id).name for token_id in token_ids]
    offsets, offset = [], first_offset
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(token_of(token_id).text)
    return {
        "tokens": tokens,
        "token_logprobs": [None if score is None else score.logprob for score in scores],
        "top_logprobs": [
            None if score is None else _by_text(token, score, token_of)
            for token, score in zip(tokens, scores, strict=True)
        ],
        "text_offset": offsets,
    }


def _by_text(token: str, score: TokenLogprobs, token_of: TokenOf) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in score.top:  # the likeliest of equal names stays
        found.setdefault(token_of(token_id).name, logprob)
    found.setdefault(token, score.logprob)
    return found


def chat_logprobs(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs], token_of: TokenOf
) -> dict[str, Any]:
    """/v1/chat/completions: one object a token."""
    return {
        "content": [
            {
                **_token(token_of(token_id), score.logprob),
                "top_logprobs": [_token(token_of(other), logprob) for other, logprob in score.top],
            }
            for token_id, score in zip(token_ids, scores, strict=True)
        ],
        "refusal": None,
    }


def _token(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": logprob, "bytes": list(token.data)}


def prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs], token_of: TokenOf
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, null for the first token.

    `rank` is null for a token that is not among the likeliest that were asked for.
    """
    found: list[dict[str, Any] | None] = [None]
    for token_id, score in zip(token_ids[1:], scores, strict=True):
        ranks = {other: rank for rank, (other, _) in enumerate(score.top, 1)}
        logprobs = {token_id: score.logprob} | dict(score.top)
        found.append(
            {
                str(other): {
                    "logprob": logprob,
                    "rank": ranks.get(other),
                    "decoded_token": token_of(other).text,
                }
                for other, logprob in logprobs.items()
            }
        )
    return found
