"""Token ids to text: a request's tokens as they come, cut at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import tokenizers
from tokenizers import decoders

from .joined_tokens import NUM_CONTEXT_TOKENS, JoinedTokens
from .library_failures import REPLACEMENT
from .stop_strings import StopSearch


class TextPiece(NamedTuple):
    """What some tokens brought. `num_tokens` of them count: all, or up to the stop string's end."""

    text: str
    num_tokens: int
    matched_stop: str | None


class TextStream:
    """One request's text so far: with what is held back. `step` gives the text that the next token
    completes, as a Detokenizer's does.

    The text of the first `min_tokens` tokens is not searched for stop strings. The one that is
    found is not shown, nor is the token of `stop_ids` that ends the output, unless `includes_stop`.
    """

    def __init__(
        self,
        step: Callable[[int], str],
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        includes_stop: bool = False,
        stop_ids: Collection[int] = (),
    ) -> None:
        # The next token's text, of a stream that is not searched.
        self.next: Callable[[int], str] = step
        if stop_ids and not includes_stop:
            hidden = frozenset(stop_ids)
            self.next = lambda token: "" if token in hidden else step(token)
        self.is_searched = bool(stops)  # for stop strings: then `next` is not enough
        self._search = StopSearch(stops, min_tokens, includes_stop) if stops else None

    def feed(self, token_ids: Sequence[int]) -> TextPiece:
        """Take the next tokens; those behind the one that completes a stop string do not count."""
        texts = map(self.next, token_ids)
        if self._search is None:
            return TextPiece("".join(texts), len(token_ids), None)
        return TextPiece(*self._search.feed(texts))

    def flush(self) -> str:
        """The last of the text, once no more tokens come."""
        return "" if self._search is None else self._search.flush()


class WholeTexts(dict[int, str | None]):
    """By token id, a token's text wherever it stands; None for one that depends on the others.

    With byte-level vocabularies (GPT-2's) a text's bytes are its tokens' bytes, one by one, and
    a token of whole characters is always the same text. `hidden_ids` have none, nor have ids that
    the tokenizer does not know. Filled as ids are looked up, so at most as long as the vocabulary.
    """

    def __init__(self, library: tokenizers.Tokenizer, hidden_ids: frozenset[int]) -> None:
        super().__init__()
        self._library = library
        self._is_byte_level = isinstance(library.decoder, decoders.ByteLevel)
        self._hidden_ids = hidden_ids
        added = library.get_added_tokens_decoder()
        self._added_ids = added.keys()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    def __missing__(self, token_id: int) -> str | None:
        self[token_id] = text = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str | None:
        if token_id in self._hidden_ids or self._library.id_to_token(token_id) is None:
            return ""
        if not self._is_byte_level or token_id in self._added_ids:
            return None  # special ones are shown or not, as a request wants
        text: str = self._library.decode([token_id])  # of bytes: it fails at none
        return text if text and REPLACEMENT not in text else None


class Detokenizer:
    """One request's text, token by token: each one's own, or what it is beside others
    (joined_tokens.py). A text that ends inside a character loses it."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        whole_texts: WholeTexts,
        prompt_token_ids: Sequence[int],
        skips_special_tokens: bool = True,
    ) -> None:
        self._library = library
        self._whole_texts = whole_texts
        self._context = prompt_token_ids[-NUM_CONTEXT_TOKENS:]
        self._skips_special_tokens = skips_special_tokens
        self._skipped_ids = whole_texts.special_ids if skips_special_tokens else frozenset()
        self._joined: JoinedTokens | None = None  # from the first such token on

    def step(self, token_id: int) -> str:
        """The text that this token completes: often a word, sometimes nothing."""
        text, joined = self._whole_texts[token_id], self._joined
        if text is not None and not (text and joined is not None and joined.held):
            return text  # nearly always; the others' context may miss such tokens
        if token_id in self._skipped_ids:
            return ""
        if joined is None:
            joined = JoinedTokens(self._library, self._context, self._skips_special_tokens)
            self._joined = joined
        return joined.step(token_id)
