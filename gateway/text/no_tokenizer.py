"""Replaces a `Tokenizer` in a gateway without one."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import InvalidRequest
from .token_text import TokenText


class NoTokenizer:
    """Serves token ids, and refuses text."""

    async def encode(
        self, text: str, *, param: str = "prompt", **options: object
    ) -> tuple[int, ...]:
        """Raises InvalidRequest."""
        raise no_text(param)

    async def decode(
        self, token_ids: Sequence[int], *, param: str = "ids", **options: object
    ) -> str:
        """Raises InvalidRequest."""
        raise no_text(param)

    def token(self, token_id: int) -> TokenText:
        """The id as a text."""
        name = f"token_id:{token_id}"
        return TokenText(name, name.encode())

    def token_id(self, text: str) -> int | None:
        return None

    def detokenizer(self, prompt_token_ids: Sequence[int], **options: object) -> NoTokenizer:
        """Itself: each token has an empty text."""
        return self

    def step(self, token_id: int) -> str:
        return ""

    def close(self) -> None:
        """Nothing to close."""


def no_text(param: str) -> InvalidRequest:
    """The error for text, in a gateway without a tokenizer."""
    return InvalidRequest(
        "this gateway has no tokenizer: give the prompt as token ids, without stop strings", param
    )
