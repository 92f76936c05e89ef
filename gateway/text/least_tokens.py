"""A lower bound of the number of tokens of a text, from tokenizer.json: a text that is too long is
refused before it is tokenised."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .token_text import BYTE_TOKEN, byte_of_letter

MOST_BYTES = 4  # of a character
_SLICE_CHARS = 1 << 16
_COMPOSED = 12  # bytes of what Unicode could compose across a slice's end

_WHITESPACE = "".join(map(chr, [*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B),
                                0x2028, 0x2029, 0x202F, 0x205F, 0x3000]))  # fmt: skip
_KEEPING = {"ByteLevel", "Digits", "Metaspace"}  # pre-tokenizers that lose no byte
_KEEPING_UNLESS_REMOVED = {"Split", "Punctuation"}


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """The lower bound by the bytes of a text, without running the tokenizer.

    Each byte weighs 1 / (bytes of the longest token that contains it). The bytes of a token weigh
    at most 1 together, so that a text that fits is never refused, and long runs of spaces in the
    vocabulary do not loosen the bound for letters. Bytes that may be lost before tokenising
    (unknown characters, stripped whitespace, normalizers that are not analysed) weigh nothing.
    `composes`: the tokens are of text in Unicode's NFC."""

    weights: NDArray[np.float32]  # [256]
    composes: bool = False

    def exceed(self, text: str, most: int) -> bool:
        """Whether the text certainly has more than `most` tokens.

        Works in slices, so that other threads can run in between.
        """
        least = 0.0
        for start in range(0, len(text), _SLICE_CHARS):
            if least + (len(text) - start) * MOST_BYTES <= most:
                return False
            least += self._weigh(text[start : start + _SLICE_CHARS])
            if least > most + 1:  # far more than rounding can be
                return True
        return False

    def _weigh(self, part: str) -> float:
        if self.composes and not part.isascii():
            part = unicodedata.normalize("NFC", part)
        counts = np.bincount(np.frombuffer(part.encode(), np.uint8), minlength=256)
        return max(0.0, float(counts @ self.weights) - (_COMPOSED if self.composes else 0))


def least_tokens(spec: Mapping[str, Any]) -> LeastTokens | None:
    """The bound for a tokenizer.json; None if a text may lose bytes, or if it is not BPE."""
    model, normalizer = spec["model"], _parts(spec.get("normalizer"), "normalizers")
    pre_tokenizers = _parts(spec.get("pre_tokenizer"), "pretokenizers")
    is_bpe = model.get("type") == "BPE" and not any(
        model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")
    )
    if not is_bpe or not all(map(_keeps, normalizer)) or not all(map(_is_keeping, pre_tokenizers)):
        return None
    is_byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
    pieces: list[str] = list(model["vocab"])
    if is_byte_level:
        kinds = {part["type"] for part in (*normalizer, *pre_tokenizers)}
        if kinds & {"Replace", "Metaspace"}:  # its spaces would be other bytes
            return None
        letters = {ord(letter): byte for letter, byte in byte_of_letter().items()}
        tokens = [piece.translate(letters).encode("latin-1", "ignore") for piece in pieces]
        known = {token[0] for token in tokens if len(token) == 1}
    else:
        known = {int(m[1], 16) for m in map(BYTE_TOKEN.match, pieces) if m}
        if not model.get("byte_fallback") or len(known) < 256:
            return None
        tokens = [piece.encode() for piece in pieces]
        tokens += [piece.replace("\u2581", " ").encode() for piece in pieces]
    added = spec.get("added_tokens") or []
    tokens += [token["content"].encode() for token in added]
    weights = _weights(tokens, known)
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        weights[list(set(_WHITESPACE.encode()))] = 0  # such a token absorbs whitespace beside it
    return LeastTokens(weights, composes=any(part["type"] == "NFC" for part in normalizer))


def _weights(tokens: Iterable[bytes], known: set[int]) -> NDArray[np.float32]:
    weights = np.zeros(256, np.float32)
    unseen = set(known)
    for token in sorted(tokens, key=len, reverse=True):
        if new := unseen.intersection(token):
            weights[list(new)] = 1 / len(token)
            unseen -= new
    return weights


def _parts(part: Mapping[str, Any] | None, name: str) -> Sequence[Mapping[str, Any]]:
    """The members of a sequence, of any depth."""
    if part is None:
        return ()
    if part["type"] != "Sequence":
        return (part,)
    return [inner for member in part[name] for inner in _parts(member, name)]


def _keeps(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] == "Replace":  # SentencePiece's space
        return (normalizer["pattern"], normalizer["content"]) == ({"String": " "}, "\u2581")
    return normalizer["type"] in ("NFC", "Prepend")


def _is_keeping(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return kind in _KEEPING or (
        kind in _KEEPING_UNLESS_REMOVED and pre_tokenizer.get("behavior") != "Removed"
    )
