"""Text to tokens and back with the `tokenizers` library, from a model directory's tokenizer.json.

Owns the two directions and where they run: short texts on the event loop, long ones on a thread.
Knows no request; the ids that end a text are the model's, given by the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from ..core.errors import InvalidRequest, StartupFailed
from .detokenizer import Detokenizer, WholeTexts
from .token_text import TokenText, token_text

# Encoding costs about a microsecond per character; below this it is cheaper than a thread's turn.
_INLINE_CHARS = 2000
_NORMALIZED = 4  # what Unicode's composition and the like may make shorter, and then some


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A loaded tokenizer; `hidden_ids` (the model's EOS ids) never show up as text."""

    _library: tokenizers.Tokenizer
    _whole_texts: WholeTexts
    _pool: ThreadPoolExecutor
    hidden_ids: frozenset[int]
    max_token_chars: int  # of a text, no token stands for more
    _tokens: dict[int, TokenText] = field(default_factory=dict)  # at most the vocabulary

    @classmethod
    def load(cls, model_dir: Path, hidden_ids: Iterable[int] = ()) -> Tokenizer:
        """Read `model_dir`/tokenizer.json; raises StartupFailed where it is absent or broken."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise StartupFailed(
                f"{model_dir} has no tokenizer.json",
                hint="save it beside the weights: AutoTokenizer.from_pretrained(DIR)"
                ".save_pretrained(DIR) writes one",
            )
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise StartupFailed(f"cannot read {path}: {error}") from error
        library.no_truncation()
        library.no_padding()
        pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")
        longest = max(map(len, library.get_vocab(with_added_tokens=True)), default=1)
        max_token_chars = longest * (1 if library.normalizer is None else _NORMALIZED)
        hidden = frozenset(hidden_ids)
        return cls(library, WholeTexts(library, hidden), pool, hidden, max_token_chars)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens included; a model may have more."""
        return self._library.get_vocab_size(with_added_tokens=True)

    async def encode(self, text: str, *, adds_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a text, with the special tokens that the model's tokenizer adds or without."""
        if len(text) <= _INLINE_CHARS:
            return self._encode(text, adds_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._encode, text, adds_special_tokens)

    def _encode(self, text: str, adds_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._library.encode(text, add_special_tokens=adds_special_tokens).ids)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, special tokens left out."""
        loop = asyncio.get_running_loop()
        ids = [i for i in token_ids if i not in self.hidden_ids]
        return await loop.run_in_executor(self._pool, self._library.decode, ids)

    def token(self, token_id: int) -> TokenText:
        """One token alone, special or not."""
        if (found := self._tokens.get(token_id)) is None:
            found = self._tokens[token_id] = token_text(self._library, token_id)
        return found

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skips_special_tokens: bool = True
    ) -> Detokenizer:
        """An incremental detokenizer for the continuation of this prompt."""
        return Detokenizer(
            self._library,
            self._whole_texts,
            self.hidden_ids,
            prompt_token_ids,
            skips_special_tokens,
        )

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class NoTokenizer:
    """In a `Tokenizer`'s place where there is none: token ids are served, text is refused."""

    vocab_size = 0

    async def encode(self, text: str, *, adds_special_tokens: bool = True) -> tuple[int, ...]:
        """Raises InvalidRequest."""
        raise _no_text("prompt")

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Raises InvalidRequest."""
        raise _no_text("ids")

    def token(self, token_id: int) -> TokenText:
        """Its id stands for it."""
        name = f"token_id:{token_id}"
        return TokenText(name, name.encode())

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skips_special_tokens: bool = True
    ) -> SilentDetokenizer:
        """One that has no text for any token."""
        return SilentDetokenizer()

    def close(self) -> None:
        """Nothing to close."""


class SilentDetokenizer:
    """Every token's text is empty."""

    def step(self, token_id: int) -> str:
        return ""


def _no_text(param: str) -> InvalidRequest:
    return InvalidRequest(
        "this gateway has no tokenizer: give the prompt as token ids, without stop strings",
        param=param,
    )


def check_needs_no_text(stop: Sequence[str]) -> None:
    """Raise InvalidRequest for what a gateway without a tokenizer cannot judge."""
    if stop:
        raise _no_text("stop")
