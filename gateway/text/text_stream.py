"""Token ids to text: a request's tokens as they come, cut at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import tokenizers
from tokenizers import decoders
from tokenizers.decoders import DecodeStream

from .library_failures import REPLACEMENT, decode_few, is_failure
from .stop_strings import StopMatcher

_NUM_CONTEXT_TOKENS = 8
_MAX_HELD_TOKENS = 32  # without a text that is whole; some vocabularies cut most characters
_MAX_CHARACTER_BYTES = 4  # of UTF-8, so at most as many tokens


class Detokenize(Protocol):
    """Detokenizer, or a fake."""

    def step(self, token_id: int) -> str: ...


class TextPiece(NamedTuple):
    """What some tokens brought. `num_tokens` of them count: all, or up to the stop string's end."""

    text: str
    num_tokens: int
    matched_stop: str | None


class TextStream:
    """One request's text so far: with what is held back.

    The text of the first `min_tokens` tokens is not searched for stop strings. The one that is
    found is not shown, nor is the token of `stop_ids` that ends the output, unless `includes_stop`.
    """

    def __init__(
        self,
        detokenizer: Detokenize,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        includes_stop: bool = False,
        stop_ids: Collection[int] = (),
    ) -> None:
        # The next token's text, of a stream that is not searched.
        self.next: Callable[[int], str] = detokenizer.step
        if stop_ids and not includes_stop:
            hidden = frozenset(stop_ids)
            self.next = lambda token: "" if token in hidden else detokenizer.step(token)
        self._matcher = StopMatcher(stops) if stops else None
        self.is_searched = bool(stops)  # for stop strings: then `next` is not enough
        self._num_unsearched = min_tokens
        self._includes_stop = includes_stop

    def feed(self, token_ids: Sequence[int]) -> TextPiece:
        """Take the next tokens; those behind the one that completes a stop string do not count."""
        if self._matcher is None:
            return TextPiece("".join(map(self.next, token_ids)), len(token_ids), None)
        shown: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            text, stop = self.next(token_id), None
            if self._num_unsearched:
                self._num_unsearched -= 1
            else:
                text, stop = self._matcher.feed(text)
            shown.append(text)
            if stop is not None:
                if self._includes_stop:
                    shown.append(stop)
                return TextPiece("".join(shown), count, stop)
        return TextPiece("".join(shown), len(token_ids), None)

    def flush(self) -> str:
        """The last of the text, once no more tokens come."""
        return "" if self._matcher is None else self._matcher.flush()


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
        text = decode_few(self._library, [token_id])
        return text if text and REPLACEMENT not in text else None


class Detokenizer:
    """One request's text, token by token.

    A character whose bytes are not all there yet is held back; a text that ends inside one loses
    it. The prompt's last tokens are the context: some tokenizers write a word's leading space
    only behind another word.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        whole_texts: WholeTexts,
        prompt_token_ids: Sequence[int],
        skips_special_tokens: bool = True,
    ) -> None:
        self._library = library
        self._whole_texts = whole_texts
        context = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        if decode_few(library, context).endswith(REPLACEMENT):
            context = []  # ends inside a character: the stream would repeat it as output
        self._skips_special_tokens = skips_special_tokens
        self._skipped_ids = whole_texts.special_ids if skips_special_tokens else frozenset()
        self._stream = self._stream_after(context)
        self._held: list[int] = []  # the last tokens, whose text the stream has not given yet
        self._num_shown = 0  # characters of it that were shown nevertheless

    def step(self, token_id: int) -> str:
        """The text that this token completes: often a word, sometimes nothing."""
        text = self._whole_texts[token_id]
        if text is not None and not (text and self._held):
            return text  # nearly always; the stream's context may miss such tokens
        return "" if token_id in self._skipped_ids else self._step(token_id)

    def _step(self, token_id: int) -> str:
        try:
            text = self._stream.step(self._library, token_id)
        except BaseException as error:  # where bytes are no UTF-8, text that was shown changed
            if not is_failure(error):
                raise
            self._stream = self._stream_after([])
            self._held, self._num_shown = [], 0
            text = self._stepped_alone(token_id)
        if text is None:
            self._held.append(token_id)
            return self._shorten() if len(self._held) > _MAX_HELD_TOKENS else ""
        text = text[self._num_shown :]
        self._held, self._num_shown = [], 0
        return text

    def _shorten(self) -> str:
        """The stream decodes all that is held for each token: go on with the last character alone,
        and show what lies before that."""
        text = self._text_of_held()
        self._held = self._held[-_MAX_CHARACTER_BYTES:]
        self._stream = self._stream_after(self._held)
        kept, begun = self._text_of_held(), self._num_shown
        if not kept.endswith(REPLACEMENT):
            self._held, self._num_shown = [], 0
            return text[begun:]
        self._num_shown = len(kept) - 1  # the stream gives it again
        return text[begun:-1]

    def _text_of_held(self) -> str:
        skips = self._skips_special_tokens
        return decode_few(self._library, self._held, skip_special_tokens=skips)

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
