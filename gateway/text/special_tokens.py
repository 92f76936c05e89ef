"""A model's special tokens, and encoding where only marked places of a text may become them.

    "<|im_start|>user\\n<|im_start|>"   special_at = [(0, 12)]
     id 151644        <, |, im, _start ...
A second tokenizer of the same vocabulary knows each special token by a secret name alone, drawn at
start. The marked places are given these names, and the library does the rest as it always does:
spaces that a token takes with it, what counts as a text's beginning, merges. Without the names
nothing that a user writes is a special token there, and the ids are the model's own.

Special are tokens that tokenizer.json calls so, and those that tokenizer_config.json names as the
begin, end, padding and unknown token. Other added tokens (`<think>`, `<tool_call>`) are words that
models write and clients send back: they are read wherever they stand.
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
    """The texts of a model's special tokens; empty where there is no tokenizer."""
    path = model_dir / "tokenizer.json"
    return specials_of(read_json(path), model_dir) if path.is_file() else frozenset()


def specials_of(spec: Mapping[str, Any], model_dir: Path) -> frozenset[str]:
    """The same of a tokenizer.json that was read."""
    path = model_dir / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    named = {token_text(config.get(name)) for name in NAMED_TOKENS}
    added = spec.get("added_tokens") or ()
    found = {t["content"] for t in added if t.get("special") or t["content"] in named}
    return frozenset(found - {""})


def token_text(value: Any) -> str:
    """A token is written as a string or as an object around one; else empty."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Matches any of these, the longest first; nothing if there is none."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


class MarkedEncoder:
    """Texts as a library takes them for which special tokens have secret names."""

    def __init__(self, spec: Mapping[str, Any], specials: frozenset[str]) -> None:
        """Raises ValueError where the vocabulary cannot be had under other names."""
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
        """The text for `library`. What stands at `special_at` are special tokens' texts."""
        pieces: list[str] = []
        last = 0
        for start, end in special_at:
            pieces += (text[last:start], self._names[text[start:end]])
            last = end
        return "".join((*pieces, text[last:]))


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """How a model's are read in texts. `marked`: None where its vocabulary cannot be had under
    other names. `are_refused`: texts in which they are not marked must not have any of `ids`."""

    ids: frozenset[int]
    marked: MarkedEncoder | None
    are_refused: bool

    def named(self, text: str, special_at: Spans) -> tuple[tokenizers.Tokenizer, str]:
        """The library that takes the text for this one, and what to give it."""
        if self.marked is None:
            raise InvalidRequest(
                "this model's special tokens cannot be told from text: use /v1/completions",
                "messages",
                "unsupported_parameter",
            )
        return self.marked.library, self.marked.named(text, special_at)

    def check_none(self, encoding: tokenizers.Encoding, param: str) -> None:
        """What the tokenizer itself put around the text is masked."""
        if self.ids.isdisjoint(encoding.ids):
            return
        pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        if any(i in self.ids and not is_around for i, is_around in pairs):
            raise InvalidRequest(
                f"{param} has a special token's text, which is refused here: send token ids",
                param,
                "invalid_value",
            )


def _renamed(spec: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """tokenizer.json with special tokens under these names, wherever their ids are looked up."""
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
