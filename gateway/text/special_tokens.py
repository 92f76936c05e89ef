"""A model's special tokens, and encoding in which only marked spans of a text become special
tokens.

    "<|im_start|>user\\n<|im_start|>"   special_at = [(0, 12)]
     id 151644        <, |, im, _start ...
A second tokenizer with the same vocabulary has secret names for the special tokens, drawn at start.
The marked spans are replaced by these names, and the library encodes the text as usual: spaces that
a token absorbs, the beginning of a text, merges. A user does not know the names, so nothing else in
the text becomes a special token; the ids are the model's own.

Special are the tokens that tokenizer.json marks so, and the begin, end, padding and unknown tokens
of tokenizer_config.json. Other added tokens (`<think>`, `<tool_call>`) are words that models write
and clients send back: they are recognised anywhere.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from ...core.errors import InvalidRequest
from ...core.model_dir import read_json

Spans = Sequence[tuple[int, int]]  # beginnings and ends, in order

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def special_texts(model_dir: Path) -> frozenset[str]:
    """The texts of a model's special tokens; empty without a tokenizer."""
    path = model_dir / "tokenizer.json"
    return specials_of(read_json(path), model_dir) if path.is_file() else frozenset()


def specials_of(spec: Mapping[str, Any], model_dir: Path) -> frozenset[str]:
    """The texts of the special tokens of a parsed tokenizer.json."""
    path = model_dir / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    named = {token_text(config.get(name)) for name in NAMED_TOKENS}
    added = spec.get("added_tokens") or ()
    found = {t["content"] for t in added if t.get("special") or t["content"] in named}
    return frozenset(found - {""})


def token_text(value: Any) -> str:
    """The text of a token, which is a string or an object with one; else empty."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Matches any of these, the longest first; nothing if there is none."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


class MarkedEncoder:
    """A tokenizer in which special tokens have secret names, and the texts for it."""

    def __init__(self, spec: Mapping[str, Any], specials: frozenset[str]) -> None:
        """Raises ValueError if the special tokens cannot be renamed."""
        key = secrets.token_hex(16)
        self._names = {text: f"{key}{i:08x}" for i, text in enumerate(sorted(specials))}
        self.library = tokenizers.Tokenizer.from_str(json.dumps(_renamed(spec, self._names)))
        self.library.no_truncation()
        self.library.no_padding()
        for token in spec.get("added_tokens") or ():
            name = self._names.get(token["content"], token["content"])
            if self.library.token_to_id(name) != token["id"]:
                raise ValueError(f"token {token['id']} cannot be renamed")

    def named(self, text: str, special_at: Spans) -> str:
        """The text for `library`. The spans `special_at` are the texts of special tokens."""
        pieces: list[str] = []
        last = 0
        for start, end in special_at:
            pieces += (text[last:start], self._names[text[start:end]])
            last = end
        return "".join((*pieces, text[last:]))


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of a model. `marked`: None if they cannot be renamed. `are_refused`: a
    text without marked spans must not have any of `ids`."""

    ids: frozenset[int]
    marked: MarkedEncoder | None
    are_refused: bool

    def named(self, text: str, special_at: Spans) -> tuple[tokenizers.Tokenizer, str]:
        """The tokenizer for the marked text, and the text for it. Raises InvalidRequest."""
        if self.marked is None:
            message = "special tokens of this model cannot be distinguished from text"
            message += ": use /v1/completions"
            raise InvalidRequest(message, "messages", "unsupported_parameter")
        return self.marked.library, self.marked.named(text, special_at)

    def check_none(self, encoding: tokenizers.Encoding, param: str) -> None:
        """Raise InvalidRequest if the text has a special token, except those that the tokenizer
        added."""
        if self.ids.isdisjoint(encoding.ids):
            return
        pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        if any(i in self.ids and not is_around for i, is_around in pairs):
            message = f"{param} has a special token's text, which is refused here: send token ids"
            raise InvalidRequest(message, param, "invalid_value")


def _renamed(spec: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """tokenizer.json with these names for special tokens, wherever their ids are looked up."""
    renamed = {key: value for key, value in spec.items() if key not in ("added_tokens", "model")}
    renamed["added_tokens"] = copy.deepcopy(spec.get("added_tokens") or [])
    for token in renamed["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = dict(spec["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:  # Unigram's: pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    renamed["model"] = model
    return renamed
