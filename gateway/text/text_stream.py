"""Token ids to text, incrementally: one request's output, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import tokenizers
from tokenizers import decoders

from ...core.request.sampling_params import SamplingParams
from .joined_tokens import NUM_CONTEXT_TOKENS, JoinedTokens
from .library_failures import REPLACEMENT
from .stop_strings import StopSearch


class TextStream:
    """The text of one request. `step` returns the text that the next token completes, like
    Detokenizer.step.

    The stop string or stop token that ends the output is part of the text only if `includes_stop`.
    """

    def __init__(
        self, step: Callable[[int], str], sampling: SamplingParams, *, includes_stop: bool = False
    ) -> None:
        # The text of the next token, if the stream is not searched for stop strings.
        self.next: Callable[[int], str] = step
        if sampling.stop_token_ids and not includes_stop:
            hidden = frozenset(sampling.stop_token_ids)
            self.next = lambda token: "" if token in hidden else step(token)
        # Unless it is None, use `feed`, not `next`.
        self.search: StopSearch | None = None
        if stops := sampling.stop:
            self.search = StopSearch(stops, sampling.min_tokens, includes_stop)

    def feed(self, token_ids: Sequence[int]) -> tuple[str, int, str | None]:
        """The text of the next tokens, the number of them that count, which ends with the one that
        completes a stop string, and that stop string."""
        texts = map(self.next, token_ids)
        if self.search is None:
            return "".join(texts), len(token_ids), None
        return self.search.feed(texts)

    def flush(self) -> str:
        """The rest of the text after the last token: what was held back for a stop string."""
        return "" if self.search is None else self.search.flush()


class WholeTexts(dict[int, str | None]):
    """Token id -> the token's text if it is the same in any context, else None.

    In byte-level vocabularies (GPT-2's) the bytes of a text are those of its tokens, so a token of
    whole characters always has the same text. `hidden_ids`, and ids that the tokenizer does not
    know, have an empty text. Filled on look-up, so at most as large as the vocabulary.
    """

    def __init__(self, library: tokenizers.Tokenizer, hidden_ids: frozenset[int]) -> None:
        super().__init__()
        self.library = library
        self._is_byte_level = isinstance(library.decoder, decoders.ByteLevel)
        self.hidden_ids = hidden_ids
        added = library.get_added_tokens_decoder()
        self._added_ids = added.keys()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    def __missing__(self, token_id: int) -> str | None:
        self[token_id] = text = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str | None:
        if token_id in self.hidden_ids or self.library.id_to_token(token_id) is None:
            return ""
        if not self._is_byte_level or token_id in self._added_ids:
            return None  # whether special tokens are shown depends on the request
        text: str = self.library.decode([token_id])  # cannot fail for byte-level tokens
        return text if text and REPLACEMENT not in text else None


class Detokenizer:
    """The text of one request, token by token: the token's own text, or its text in context
    (joined_tokens.py). An incomplete last character is dropped."""

    def __init__(
        self,
        whole_texts: WholeTexts,
        prompt_token_ids: Sequence[int],
        skips_special_tokens: bool = True,
    ) -> None:
        context = prompt_token_ids[-NUM_CONTEXT_TOKENS:]
        self._new_joined = partial(JoinedTokens, whole_texts.library, context, skips_special_tokens)
        self._whole_texts = whole_texts
        self._skipped_ids = whole_texts.special_ids if skips_special_tokens else frozenset()
        self._joined: JoinedTokens | None = None  # from the first token without its own text on

    def step(self, token_id: int) -> str:
        """The text that this token completes: often a word, sometimes nothing."""
        text, joined = self._whole_texts[token_id], self._joined
        if text is not None and not (text and joined is not None and joined.held):
            return text  # nearly always; the context of joined tokens may lack these
        if token_id in self._skipped_ids:
            return ""
        if joined is None:
            joined = self._joined = self._new_joined()
        return joined.step(token_id)
