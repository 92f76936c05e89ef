"""Text to tokens and back with the `tokenizers` library.

Owns the two directions, what is refused before they begin, that no failure of the library's is more
than one caller's error, and where they run, so that long texts stop neither the event loop nor
short ones:

    up to 2,000 characters   on the event loop: sooner done than a thread is woken
    up to 65,536             two threads
    longer                   one thread, one text after the other: memory for one at a time

What waits for a thread belongs to a call that was admitted, so its number is bounded; whoever gives
up while waiting is taken off. Knows no request; the ids that end a text are the model's, given by
the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import tokenizers

from ...core.errors import ContextLengthExceeded
from .least_tokens import MOST_BYTES, LeastTokens
from .library_failures import refuse
from .special_tokens import Spans, SpecialTokens
from .text_stream import Detokenizer, WholeTexts
from .token_text import TokenText, token_text

INLINE_CHARS = 2000  # about a microsecond each
LONG_CHARS = 1 << 16

_T = TypeVar("_T")


class TextLanes:
    """The three ways by length; use from one event loop. Only for work that releases the
    interpreter."""

    def __init__(self) -> None:
        self._middle = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")

    async def run(self, length: int, work: Callable[[], _T]) -> _T:
        """What `work` of this length (characters, token ids) gives or raises."""
        if length <= INLINE_CHARS:
            return work()
        pool = self._middle if length <= LONG_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Waits for what has begun."""
        self._middle.shutdown(cancel_futures=True)
        self._long.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A loaded tokenizer; `hidden_ids` (the model's EOS ids) never show up as text."""

    _library: tokenizers.Tokenizer
    _whole_texts: WholeTexts
    _lanes: TextLanes
    _least: LeastTokens | None
    _special: SpecialTokens
    hidden_ids: frozenset[int]
    _tokens: dict[int, TokenText] = field(default_factory=dict)  # at most the vocabulary

    async def encode(
        self,
        text: str,
        *,
        adds_special_tokens: bool = True,
        special_at: Spans | None = None,
        max_tokens: int | None = None,
        param: str = "prompt",
    ) -> tuple[int, ...]:
        """The ids of a text, with the special tokens that the model's tokenizer adds or without.

        `special_at`: where alone the text has special tokens; None: wherever it has their texts.
        Raises ContextLengthExceeded for more than `max_tokens`, if that is possible before work
        that grows with the text, and InvalidRequest; both name `param`.
        """

        def work() -> tuple[int, ...]:
            if max_tokens is not None and self._exceeds(text, max_tokens):
                raise _too_long(f"{len(text)} characters", max_tokens, param)
            try:
                library, named = self._library, text
                if special_at is not None:
                    library, named = self._special.named(text, special_at)
                # The batch's call leaves the interpreter to others while it works.
                encoding = library.encode_batch_fast(
                    [named], add_special_tokens=adds_special_tokens
                )[0]
                if max_tokens is not None and len(encoding) > max_tokens:
                    raise _too_long(f"{len(encoding)} tokens", max_tokens, param)
                if self._special.are_refused and special_at is None:
                    self._special.check_none(encoding, param)
                return tuple(encoding.ids)
            except BaseException as error:
                refuse(error, "the model's tokenizer cannot take this text", param)

        return await self._lanes.run(len(text), work)

    def _exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether it has more tokens for sure, as far as its bytes tell."""
        is_short = MOST_BYTES * len(text) <= max_tokens
        return not is_short and self._least is not None and self._least.exceed(text, max_tokens)

    async def decode(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, param: str = "ids"
    ) -> str:
        """The text of these ids, special tokens left out.

        Raises ContextLengthExceeded for more than `max_tokens`, InvalidRequest.
        """
        if max_tokens is not None and len(token_ids) > max_tokens:
            raise _too_long(f"{len(token_ids)} tokens", max_tokens, param)

        def work() -> str:
            ids = list(token_ids)
            if not self.hidden_ids.isdisjoint(ids):
                ids = [i for i in ids if i not in self.hidden_ids]
            try:
                text: str = self._library.decode_batch([ids])[0]
            except BaseException as error:
                refuse(error, "the model's tokenizer cannot decode these ids", param)
            return text

        return await self._lanes.run(len(token_ids), work)

    def token(self, token_id: int) -> TokenText:
        """One token alone, special or not."""
        if (found := self._tokens.get(token_id)) is None:
            found = self._tokens[token_id] = replace(
                token_text(self._library, token_id),
                is_special=token_id in self._whole_texts.special_ids,
                is_hidden=token_id in self.hidden_ids,
            )
        return found

    def token_id(self, text: str) -> int | None:
        """The id of the one token that is this text; None where it takes several."""
        found: int | None = self._library.token_to_id(text)
        return found

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skips_special_tokens: bool = True
    ) -> Detokenizer:
        """An incremental detokenizer for the continuation of this prompt."""
        return Detokenizer(self._library, self._whole_texts, prompt_token_ids, skips_special_tokens)

    def close(self) -> None:
        self._lanes.close()


def _too_long(what: str, max_tokens: int, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"{param} ({what}) does not fit the context of {max_tokens} tokens", param=param
    )
