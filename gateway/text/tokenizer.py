"""Text to tokens and back with the `tokenizers` library.

Owns both directions, the checks before them, and the isolation of the library's failures, each of
which fails one call. Also where they run, so that a long text blocks neither the event loop nor
short texts:

    up to 2,000 characters   on the event loop: faster than to wake a thread
    up to 65,536             two threads
    longer                   one thread: memory for one text at a time

The number of waiting texts is bounded, as each belongs to an admitted call; a cancelled call leaves
the queue. Knows no request; the model's EOS ids are given by the caller.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import tokenizers

from ...core.errors import ContextLengthExceeded
from .least_tokens import MOST_BYTES, LeastTokens
from .library_failures import refuse
from .special_tokens import Spans, SpecialTokens
from .text_stream import Detokenizer, WholeTexts
from .token_text import TokenText

INLINE_CHARS = 2000  # about a microsecond each
LONG_CHARS = 1 << 16

_T = TypeVar("_T")


class TextLanes:
    """The threads by length of a text. Use from one event loop, for work that releases the GIL."""

    def __init__(self) -> None:
        self._middle = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")

    async def run(self, length: int, work: Callable[[], _T]) -> _T:
        """Run `work` on a text of this length (characters or token ids)."""
        if length <= INLINE_CHARS:
            return work()
        pool = self._middle if length <= LONG_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Wait for work that has started."""
        self._middle.shutdown(cancel_futures=True)
        self._long.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A loaded tokenizer. The model's EOS ids have no text.

    `token`: the text of one token by itself, special or not. `token_id`: the id of the token with
    this text; None if there is none.
    """

    _library: tokenizers.Tokenizer
    _whole_texts: WholeTexts
    _lanes: TextLanes
    _least: LeastTokens | None
    _special: SpecialTokens
    token: Callable[[int], TokenText]
    token_id: Callable[[str], int | None]

    async def encode(
        self,
        text: str,
        *,
        adds_special_tokens: bool = True,
        special_at: Spans | None = None,
        max_tokens: int = sys.maxsize,
        param: str = "prompt",
    ) -> tuple[int, ...]:
        """The ids of a text, with or without the special tokens that the model's tokenizer adds.

        `special_at`: the only spans of the text that are special tokens; None: special tokens are
        recognised anywhere in it. Raises ContextLengthExceeded for more than `max_tokens`, before
        tokenising if the text's length allows, and InvalidRequest; both name `param`.
        """

        def work() -> tuple[int, ...]:
            is_short = MOST_BYTES * len(text) <= max_tokens
            if not is_short and self._least is not None and self._least.exceed(text, max_tokens):
                raise _too_long(f"{len(text)} characters", max_tokens, param)
            try:
                library, named = self._library, text
                if special_at is not None:
                    library, named = self._special.named(text, special_at)
                # Only the batch call releases the GIL while it works.
                batch = library.encode_batch_fast([named], add_special_tokens=adds_special_tokens)
                encoding = batch[0]
                if len(encoding) > max_tokens:
                    raise _too_long(f"{len(encoding)} tokens", max_tokens, param)
                if self._special.are_refused and special_at is None:
                    self._special.check_none(encoding, param)
                return tuple(encoding.ids)
            except BaseException as error:
                refuse(error, "the model's tokenizer cannot take this text", param)

        return await self._lanes.run(len(text), work)

    async def decode(
        self, token_ids: Sequence[int], *, max_tokens: int = sys.maxsize, param: str = "ids"
    ) -> str:
        """The text of these ids, without special tokens. Raises ContextLengthExceeded for more than
        `max_tokens`, and InvalidRequest."""
        if len(token_ids) > max_tokens:
            raise _too_long(f"{len(token_ids)} tokens", max_tokens, param)

        def work() -> str:
            ids = [i for i in token_ids if i not in self._whole_texts.hidden_ids]
            try:
                return str(self._library.decode_batch([ids])[0])
            except BaseException as error:
                refuse(error, "the model's tokenizer cannot decode these ids", param)

        return await self._lanes.run(len(token_ids), work)

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skips_special_tokens: bool = True
    ) -> Detokenizer:
        """An incremental detokenizer for the output after this prompt."""
        return Detokenizer(self._whole_texts, prompt_token_ids, skips_special_tokens)

    def close(self) -> None:
        self._lanes.close()


def _too_long(what: str, max_tokens: int, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"{param} ({what}) does not fit the context of {max_tokens} tokens", param=param
    )
