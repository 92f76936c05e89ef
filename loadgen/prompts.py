"""What `baton bench` sends: prompts and lengths, drawn or from a file.

words      random words; with a tokenizer as many tokens as wanted, else as many words
token-ids  random token ids; completions only
sharegpt   conversations, JSON or a line each: the first message, as long an answer as the first had
lengths    JSON lines of input_length and output_length, as traces have; the prompts are words
jsonl      JSON lines of a prompt or messages, with max_tokens or without

Prompts of one seed are the same in every run.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import StartupFailed
from .generator import PlannedRequest

_FIRST_ID = 3  # special ids are low in most vocabularies
_LETTERS = "aeiou", "bcdfghklmnprstvw"
_NUM_WORDS = 4096
_INPUT_NAMES = ("input_length", "input_len", "prompt_tokens", "num_prompt_tokens")
_OUTPUT_NAMES = ("output_length", "output_len", "max_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True)
class PromptShape:
    """`range_ratio` r: lengths are drawn from n (1 - r) to n (1 + r); `count`: the tokens of a
    text. `shared_prefix_len`: the same beginning of all drawn prompts, beside their own part."""

    dataset: str
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    shared_prefix_len: int = 0
    path: Path | None = None
    vocab_size: int | None = None
    seed: int = 0
    count: Callable[[str], int] | None = None


def requests(shape: PromptShape) -> Iterator[PlannedRequest]:
    """Requests without end; those of a file in a drawn order, again and again.

    Raises StartupFailed for a file that cannot be used.
    """
    rng = random.Random(shape.seed)
    if shape.dataset in ("words", "token-ids"):
        prompts = _Drawn(shape, rng)
        return (prompts.of(*_lengths(shape, rng)) for _ in itertools.count())
    entries = _from_file(shape, rng)
    if not entries:
        raise StartupFailed(f"{shape.path} has nothing that can be sent")
    rng.shuffle(entries)
    return itertools.cycle(entries)


def tokenizer_count(folder: str) -> Callable[[str], int]:
    """Counts a text's tokens by `tokenizer.json`, a file or in a folder; raises StartupFailed."""
    from tokenizers import Tokenizer

    path = Path(folder)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise StartupFailed(f"{path} is no tokenizer: {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


class _Drawn:
    """Draws prompts of a length, behind the prefix that all share."""

    def __init__(self, shape: PromptShape, rng: random.Random) -> None:
        self._shape, self._rng = shape, rng
        vowels, consonants = _LETTERS
        self._words = [
            "".join(rng.choice(letters) for letters in (consonants, vowels) * rng.randint(1, 3))
            for _ in range(_NUM_WORDS)
        ]
        self._num_tokens = _tokens_of_words(self._words, shape.count)
        self._prefix_ids = self._ids(shape.shared_prefix_len)
        self._prefix = self._text(shape.shared_prefix_len)

    def of(self, input_len: int, output_len: int) -> PlannedRequest:
        whole = input_len + self._shape.shared_prefix_len
        if self._shape.dataset == "token-ids":
            return PlannedRequest([*self._prefix_ids, *self._ids(input_len)], whole, output_len)
        text = " ".join(part for part in (self._prefix, self._text(input_len)) if part)
        return PlannedRequest(text, whole, output_len)

    def _ids(self, length: int) -> list[int]:
        size = self._shape.vocab_size
        return [] if size is None else [self._rng.randrange(_FIRST_ID, size) for _ in range(length)]

    def _text(self, length: int) -> str:
        """At least a word; the last one is left out where it does not fit."""
        words: list[str] = []
        num_tokens = 0
        while num_tokens < length:
            word = self._rng.choice(self._words)
            num_tokens += self._num_tokens.get(word, 1)
            if num_tokens <= length or not words:
                words.append(word)
        return " ".join(words)


def _tokens_of_words(words: Sequence[str], count: Callable[[str], int] | None) -> Mapping[str, int]:
    """Counted once, behind another word: while a load runs nothing may keep its clock waiting."""
    if count is None:
        return {}
    before = words[0]
    num_before = count(before)
    return {word: max(1, count(f"{before} {word}") - num_before) for word in words}


def _lengths(shape: PromptShape, rng: random.Random) -> tuple[int, int]:
    def drawn(length: int) -> int:
        share = shape.range_ratio
        return max(1, rng.randint(round(length * (1 - share)), round(length * (1 + share))))

    return drawn(shape.input_len), drawn(shape.output_len)


def _from_file(shape: PromptShape, rng: random.Random) -> list[PlannedRequest]:
    assert shape.path is not None
    read = {"sharegpt": _conversation, "lengths": _drawn_length, "jsonl": _line}[shape.dataset]
    drawn = _Drawn(shape, rng)
    found = []
    for number, entry in enumerate(_entries(shape.path), 1):
        try:
            one = read(entry, shape, drawn)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise StartupFailed(f"{shape.path}, entry {number}: {what}") from error
        if one is not None:
            found.append(one)
    return found


def _entries(path: Path) -> Sequence[Any]:
    """A JSON array, or one value a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupFailed(f"{path} cannot be read: {error}") from error
    try:
        if text.lstrip().startswith("["):
            found: list[Any] = json.loads(text)
            return found
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise StartupFailed(f"{path} is no JSON, nor JSON lines: {error}") from error


def _conversation(entry: Mapping[str, Any], shape: PromptShape, _: _Drawn) -> PlannedRequest | None:
    turns = [str(turn["value"]) for turn in entry["conversations"]]
    if len(turns) < 2 or not turns[0].strip() or not turns[1].strip():
        return None
    count = shape.count or (lambda text: len(text.split()))
    return PlannedRequest(turns[0], count(turns[0]), max(1, count(turns[1])))


def _drawn_length(entry: Mapping[str, Any], shape: PromptShape, drawn: _Drawn) -> PlannedRequest:
    return drawn.of(_length(entry, _INPUT_NAMES), _length(entry, _OUTPUT_NAMES))


def _length(entry: Mapping[str, Any], names: Sequence[str]) -> int:
    value = next((entry[name] for name in names if name in entry), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{names[0]} must be a number from 1 on")
    return value


def _line(entry: Mapping[str, Any], shape: PromptShape, _: _Drawn) -> PlannedRequest:
    content = entry.get("messages") or entry["prompt"]
    is_chat = isinstance(content, list) and all(isinstance(one, dict) for one in content)
    if not content or not (isinstance(content, str) or is_chat):
        raise ValueError("prompt must be a text, messages a list of messages")
    has_length = any(name in entry for name in _OUTPUT_NAMES)
    length = _length(entry, _OUTPUT_NAMES) if has_length else shape.output_len
    text = content if isinstance(content, str) else json.dumps(content)
    return PlannedRequest(content, shape.count(text) if shape.count else len(text.split()), length)
