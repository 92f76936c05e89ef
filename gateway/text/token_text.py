"""The text of a single token."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import tokenizers
from tokenizers import pre_tokenizers

from .library_failures import REPLACEMENT, decode_few

_WORD_START = "\u2581"  # how SentencePiece writes a leading space
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>\Z")


@dataclass(frozen=True, slots=True)
class TokenText:
    """`data`: the bytes of the token. `text` has U+FFFD for bytes that are no whole character.

    Texts of several tokens omit a token that `is_hidden`, and one that `is_special` unless the
    request shows special tokens.
    """

    text: str
    data: bytes
    is_special: bool = False
    is_hidden: bool = False

    @property
    def name(self) -> str:
        """The text, or the bytes in hex: tokens with different bytes have different names."""
        if REPLACEMENT not in self.text:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


def token_texts(
    library: tokenizers.Tokenizer, special_ids: Collection[int], hidden_ids: Collection[int]
) -> Callable[[int], TokenText]:
    """Token id -> its text; filled on look-up, so at most as large as the vocabulary."""

    @functools.cache
    def token(token_id: int) -> TokenText:
        text, data = _text_of(library, token_id)
        return TokenText(text, data, token_id in special_ids, token_id in hidden_ids)

    return token


def _text_of(library: tokenizers.Tokenizer, token_id: int) -> tuple[str, bytes]:
    """Empty for an id that the tokenizer does not know: models may have more than it."""
    piece = library.id_to_token(token_id)
    if piece is None:
        return "", b""
    text = decode_few(library, [token_id], skip_special_tokens=False)
    if REPLACEMENT in text:
        return text, _bytes_of(piece) or text.encode()
    if piece.startswith(_WORD_START) and not text.startswith(" "):
        text = f" {text}"  # a decoder strips the space of a text's first token
    return text, text.encode()


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
