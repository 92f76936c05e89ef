"""Token ids to text: a request's tokens as they come, cut at a stop string; one token alone.

What could be the beginning of a stop string is held back. The match that is complete first wins; of
those that end at the same character, the longest. So the outcome does not depend on how the text
was cut into pieces.

    stop "END"     fed "a E"  ->  shown "a "   held "E"
                   fed "N"    ->  shown ""     held "EN"
                   fed "x D"  ->  shown "ENx D"
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.decoders import DecodeStream

from .library_failures import is_failure

_NUM_CONTEXT_TOKENS = 8
_MAX_HELD_TOKENS = 32  # without a text that is whole; some vocabularies cut most characters
_MAX_CHARACTER_BYTES = 4  # of UTF-8, so at most as many tokens
_REPLACEMENT = "\ufffd"
_WORD_START = "\u2581"  # how SentencePiece writes a leading space
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>\Z")


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
        self._matcher = StopMatcher(stops)
        self.is_searched = bool(stops)  # for stop strings: then `next` is not enough
        self._num_unsearched = min_tokens
        self._includes_stop = includes_stop

    def feed(self, token_ids: Sequence[int]) -> TextPiece:
        """Take the next tokens; those behind the one that completes a stop string do not count."""
        if not self.is_searched:
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
        return self._matcher.flush()


@dataclass(slots=True)
class StopMatcher:
    """One request's matcher. After a match nothing more may be fed."""

    stops: Sequence[str]
    _held: str = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take more text; return what can be shown now, and the stop string that matched."""
        if not self.stops:
            return text, None
        buffer = self._held + text
        found = [(buffer.find(stop), stop) for stop in self.stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if ends:
            _, start, stop = min(ends)
            self._held = ""
            return buffer[:start], stop
        num_shown = len(buffer) - self._num_held(buffer)
        self._held = buffer[num_shown:]
        return buffer[:num_shown], None

    def flush(self) -> str:
        """The text ended: what was held back was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        longest = max((len(stop) for stop in self.stops), default=0) - 1
        for length in range(min(longest, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(stop.startswith(end) for stop in self.stops):
                return length
        return 0


# --- one request's text, not cut ------------------------------------------------------------------


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
        return text if text and _REPLACEMENT not in text else None


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
        if decode_few(library, context).endswith(_REPLACEMENT):
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
        if not kept.endswith(_REPLACEMENT):
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
            return _REPLACEMENT
        return text

    def _stream_after(self, context: Sequence[int]) -> DecodeStream:
        return DecodeStream(ids=context, skip_special_tokens=self._skips_special_tokens)


# --- one token alone -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenText:
    """`text` has U+FFFD where the token's bytes alone are no character; `data` are these bytes.

    Texts of several tokens leave it out where it `is_special`, unless a request shows these, and in
    any case where it `is_hidden`.
    """

    text: str
    data: bytes
    is_special: bool = False
    is_hidden: bool = False

    @property
    def name(self) -> str:
        """The text, or the bytes spelled out: no two tokens of other bytes have the same."""
        if _REPLACEMENT not in self.text:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


def decode_few(
    library: tokenizers.Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """The text of a few tokens; U+FFFD for those that the library fails at."""
    try:
        text: str = library.decode(token_ids, skip_special_tokens=skip_special_tokens)
    except BaseException as error:
        if not is_failure(error):
            raise
        return _REPLACEMENT
    return text


def token_text(library: tokenizers.Tokenizer, token_id: int) -> TokenText:
    """Empty for an id that the tokenizer does not know: models may have more than it."""
    piece = library.id_to_token(token_id)
    if piece is None:
        return TokenText("", b"")
    text = decode_few(library, [token_id], skip_special_tokens=False)
    if _REPLACEMENT in text:
        return TokenText(text, _bytes_of(piece) or text.encode())
    if piece.startswith(_WORD_START) and not text.startswith(" "):
        text = f" {text}"  # a decoder strips the space of a text's first token
    return TokenText(text, text.encode())


def _bytes_of(piece: str) -> bytes | None:
    """The bytes of a token that ends inside a character; None if it is not written as bytes."""
    if match := BYTE_TOKEN.match(piece):
        return bytes([int(match[1], 16)])
    byte_of = byte_of_letter()
    if all(letter in byte_of for letter in piece):
        return bytes(byte_of[letter] for letter in piece)
    return None


@functools.cache
def byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, others for letters from U+0100."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    themselves = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = [byte for byte in range(256) if byte not in themselves.values()]
    return themselves | dict(zip([c for c in letters if ord(c) >= 256], others, strict=True))
