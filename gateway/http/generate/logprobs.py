"""Log-probabilities in the three shapes that clients know: completions', chat's, and vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from ....core.request.logprobs import TokenLogprobs
from ...text.text_stream import TokenText
from ..protocol.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprobs,
)

TokenOf = Callable[[int], TokenText]


def completion_logprobs(
    token_ids: Sequence[int],
    scores: Sequence[TokenLogprobs | None],
    token_of: TokenOf,
    first_offset: int,
) -> CompletionLogprobs:
    """/v1/completions: the first token of a prompt has no score.

    `top_logprobs` hold the token itself beside the likeliest, equals by name once.
    `first_offset`: where in the text the first token begins, in characters.
    """
    tokens = [token_of(token_id) for token_id in token_ids]
    lengths = (len(token.text) for token in tokens[:-1])
    return CompletionLogprobs(
        tokens=[token.name for token in tokens],
        token_logprobs=[None if score is None else score.logprob for score in scores],
        top_logprobs=[
            None if score is None else _by_text(token.name, score, token_of)
            for token, score in zip(tokens, scores, strict=True)
        ],
        text_offset=list(accumulate(lengths, initial=first_offset)) if tokens else [],
    )


def _by_text(token: str, score: TokenLogprobs, token_of: TokenOf) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in score.top:  # the likeliest of equal names stays
        found.setdefault(token_of(token_id).name, logprob)
    found.setdefault(token, score.logprob)
    return found


def chat_logprobs(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs], token_of: TokenOf
) -> ChatLogprobs:
    """/v1/chat/completions: one object a token."""

    def of(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        token = token_of(token_id)
        return token.text, logprob, list(token.data)

    return ChatLogprobs(
        [
            TopLogprobs(
                *of(token_id, score.logprob), [TokenLogprob(*of(*other)) for other in score.top]
            )
            for token_id, score in zip(token_ids, scores, strict=True)
        ]
    )


def prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs], token_of: TokenOf
) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: null for the first token."""
    found: PromptLogprobs = [None]
    for token_id, score in zip(token_ids[1:], scores, strict=True):
        ranks = {other: rank for rank, (other, _) in enumerate(score.top, 1)}
        logprobs = {token_id: score.logprob} | dict(score.top)
        found.append(
            {
                str(other): PromptLogprob(logprob, ranks.get(other), token_of(other).text)
                for other, logprob in logprobs.items()
            }
        )
    return found
