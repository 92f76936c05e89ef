"""Token ids to text, as they come: one request's tokens one by one."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders
from tokenizers.decoders import DecodeStream

from .foreign_code import is_failure
from .token_text import decode_few

_NUM_CONTEXT_TOKENS = 8
_REPLACEMENT = "\ufffd"


class WholeTexts(dict[int, str | None]):
    """By token id, what a token says wherever it stands; None for one that depends on the others.

    With byte-level vocabularies (GPT-2's) a text's bytes are its tokens' bytes, one by one, and
    a token of whole characters is always the same text. Filled as ids are asked for, so at
    most as long as the vocabulary.
    """

    def __init__(self, library: tokenizers.Tokenizer, hidden_ids: frozenset[int]) -> None:
        super().__init__()
        self._library = library
        self._is_byte_level = isinstance(library.decoder, decoders.ByteLevel)
        # Special tokens are shown or not, as a request asks.
        self._left_out = hidden_ids | library.get_added_tokens_decoder().keys()

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._find(token_id)
        return text

    def _find(self, token_id: int) -> str | None:
        if not self._is_byte_level or token_id in self._left_out:
            return None
        text = decode_few(self._library, [token_id])
        return text if text and _REPLACEMENT not in text else None


class Detokenizer:
    """One request's text, token by token.

    A character whose bytes are not all there yet is held back; a text that ends inside one loses
    it. The prompt's last tokens are the context: some tokenizers write a word's leading space
    only behind another word. `hidden_ids` never show up as text.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        whole_texts: WholeTexts,
        hidden_ids: frozenset[int],
        prompt_token_ids: Sequence[int],
        skips_special_tokens: bool = True,
    ) -> None:
        self._library = library
        self._whole_texts = whole_texts
        self._hidden_ids = hidden_ids
        context = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        if decode_few(library, context).endswith(_REPLACEMENT):
            context = []  # ends inside a character: the stream would repeat it as output
        self._skips_special_tokens = skips_special_tokens
        self._stream = self._stream_after(context)
        self._holds_none = True  # of the last token's text

    def step(self, token_id: int) -> str:
        """The text that this token completes: often a word, sometimes nothing."""
        if self._holds_none:
            text = self._whole_texts[token_id]
            if text is not None:  # nearly always; the stream's context may miss such tokens
                return text
        return self._step(token_id)

    def _step(self, token_id: int) -> str:
        if token_id in self._hidden_ids:
            return ""
        try:
            text = self._stream.step(self._library, token_id)
        except BaseException as error:  # where bytes are no UTF-8, text that was shown changed
            if not is_failure(error):
                raise
            self._stream = self._stream_after([])
            text = self._stepped_alone(token_id)
        self._holds_none = text is not None
        return text or ""

    def _stepped_alone(self, token_id: int) -> str | None:
        """A token that the library fails at even alone must not end what others' tokens need."""
        try:
            text: str | None = self._stream.step(self._library, token_id)
        except BaseException as error:
            if not is_failure(error):
                raise
            return _REPLACEMENT
        return text

    def _stream_after(self, context: Sequence[int]) -> DecodeStream:
        return DecodeStream(ids=context, skip_special_tokens=self._skips_special_tokens)
