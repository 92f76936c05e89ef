"""Tokens without a text of their own: it depends on their neighbours.

A character is held back until all its bytes have arrived. The prompt's last tokens are the context:
some tokenizers write the leading space of a word only after another word.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers.decoders import DecodeStream

from .library_failures import REPLACEMENT, decode_few, is_failure

NUM_CONTEXT_TOKENS = 8
_MAX_HELD_TOKENS = 32  # without complete text; some vocabularies split most characters
_MAX_CHARACTER_BYTES = 4  # of UTF-8, so at most as many tokens


class JoinedTokens:
    """The tokens of one request. `held`: the last ones, whose text has not been returned yet."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        prompt_token_ids: Sequence[int],
        skips_special_tokens: bool,
    ) -> None:
        self._library = library
        self._skips_special_tokens = skips_special_tokens
        context = list(prompt_token_ids)
        if decode_few(library, context).endswith(REPLACEMENT):
            context = []  # ends inside a character: the stream would repeat it as output
        self._stream = self._stream_after(context)
        self.held: list[int] = []
        self._num_shown = 0  # characters of `held` that were returned already

    def step(self, token_id: int) -> str:
        """The text that this token completes."""
        try:
            text = self._stream.step(self._library, token_id)
        except BaseException as error:  # where bytes are no UTF-8, text that was shown changed
            if not is_failure(error):
                raise
            self._stream = self._stream_after([])
            self.held, self._num_shown = [], 0
            text = self._stepped_alone(token_id)
        if text is None:
            self.held.append(token_id)
            return self._shorten() if len(self.held) > _MAX_HELD_TOKENS else ""
        text = text[self._num_shown :]
        self.held, self._num_shown = [], 0
        return text

    def _shorten(self) -> str:
        """The stream decodes all that is held for each token: go on with the last character alone,
        and show what lies before that."""
        text = self._text_of_held()
        self.held = self.held[-_MAX_CHARACTER_BYTES:]
        self._stream = self._stream_after(self.held)
        kept, begun = self._text_of_held(), self._num_shown
        if not kept.endswith(REPLACEMENT):
            self.held, self._num_shown = [], 0
            return text[begun:]
        self._num_shown = len(kept) - 1  # the stream gives it again
        return text[begun:-1]

    def _text_of_held(self) -> str:
        skips = self._skips_special_tokens
        return decode_few(self._library, self.held, skip_special_tokens=skips)

    def _stepped_alone(self, token_id: int) -> str | None:
        """A token that the library fails at even alone must not end what others' tokens need."""
        try:
            text: str | None = self._stream.step(self._library, token_id)
        except BaseException as error:
            if not is_failure(error):
                raise
            return REPLACEMENT
        return text

    def _stream_after(self, context: Sequence[int]) -> DecodeStream:
        return DecodeStream(ids=context, skip_special_tokens=self._skips_special_tokens)
