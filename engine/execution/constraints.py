"""The tokens that constrained sequences may continue with, as bit masks for the sampler, and the
token counts of a sequence, for penalties.

A sequence's matcher follows its output tokens, whether sampled here, handed over, or known
from an earlier attempt or before a preemption. It reads them when a mask is needed, so the tokens
are all its state.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...constraints.grammars import Grammar, Grammars, accept, cannot_go_on
from ...core.errors import InvalidRequest
from ...core.request.constraint import Constraint
from ...kernels.sampling.sample_spec import Counts

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_WORD_BITS = 32
_MAX_THREADS = 8

Mask = NDArray[np.int32]  # [words]: bit i % 32 of word i // 32 says whether token i may come


@dataclass(slots=True, eq=False)
class Constrained:
    """One sequence's place in its grammar."""

    grammar: Grammar
    num_followed: int = 0  # output tokens
    _matcher: LLMatcher | None = field(default=None, repr=False)

    def another(self) -> Constrained:
        """The same grammar from its beginning, for another sample."""
        return Constrained(self.grammar)

    def begin_again(self) -> None:
        """Reset the matcher, which failed on drafts, to follow the output tokens again."""
        self.num_followed, self._matcher = 0, None

    def catch_up(self, output_token_ids: Sequence[int]) -> LLMatcher:
        """The matcher, advanced to the end of these tokens. Raises InvalidRequest if they do not
        match the grammar."""
        if self._matcher is None:
            self._matcher = self.grammar.follow()
        accept(self._matcher, output_token_ids[self.num_followed :])
        self.num_followed = len(output_token_ids)
        return self._matcher


Sample = tuple[Constrained, Sequence[int], Sequence[int]]  # its output tokens, and drafts


class Constraints:
    """The constraints of one engine."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._num_words = -(-grammars.vocab_size // _WORD_BITS)
        self._executor: LLExecutor | None = None

    def begin(self, constraint: Constraint) -> Constrained:
        """The grammar state of a new sequence, compiled on first use. Raises InvalidRequest."""
        return Constrained(self._grammars.compile(constraint))

    def masks(self, samples: Sequence[Sample]) -> list[list[Mask] | InvalidRequest]:
        """For each sample the mask of its next token and one after each of its (matching) drafts,
        as far as the grammar's limits allow; or why it fails. Several are computed in parallel."""
        results: list[list[Mask] | InvalidRequest] = []
        masks = np.zeros((len(samples), self._num_words), np.int32)
        rows: list[tuple[LLMatcher, int]] = []
        for row, (constrained, output_token_ids, _) in enumerate(samples):
            results.append([masks[row]])
            try:
                rows.append((constrained.catch_up(output_token_ids), row))
            except InvalidRequest as error:
                results[row] = error
        self._compute(rows, masks)
        for matcher, row in rows:
            if matcher.is_error() or not masks[row].any():
                results[row] = cannot_go_on(matcher)
            elif drafts := samples[row][2]:
                behind = self._behind(matcher, drafts)
                results[row] = [masks[row], *behind]
                if len(behind) < len(drafts):
                    samples[row][0].begin_again()
        return results

    def num_fitting(self, sample: Sample) -> int:
        """How many of the sample's drafts match the grammar after its output. Raises InvalidRequest
        if the output does not match."""
        constrained, output_token_ids, drafts = sample
        return constrained.catch_up(output_token_ids).validate_tokens(list(drafts))

    def _behind(self, matcher: LLMatcher, drafts: Sequence[int]) -> list[Mask]:
        """Masks after each draft, up to where the matcher fails; else it is rolled back."""
        masks = np.zeros((len(drafts), self._num_words), np.int32)
        for number, (draft, mask) in enumerate(zip(drafts, masks, strict=True)):
            if matcher.consume_tokens([draft]):
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error() or not mask.any():
                return [*masks[:number]]
        matcher.rollback(len(drafts))
        return [*masks]

    def _compute(self, rows: list[tuple[LLMatcher, int]], masks: NDArray[np.int32]) -> None:
        if len(rows) == 1:
            ((matcher, row),) = rows
            matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
        elif rows:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
            self._executor.unsafe_compute_mask_ptr(
                rows, masks.ctypes.data, masks.strides[0], len(masks)
            )


def mask_of(token_ids: Sequence[int]) -> Mask:
    """A mask that allows these tokens, no longer than the word of the last."""
    bits = np.zeros((max(token_ids) // _WORD_BITS + 1) * _WORD_BITS, bool)
    bits[[*token_ids]] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


def within(masks: Sequence[Mask], allowed: Mask) -> list[Mask] | InvalidRequest:
    """A sample's masks restricted to `allowed`, up to the first that is empty; or why it fails."""
    found = [mask[: len(allowed)] & allowed[: len(mask)] for mask in masks]
    num_left = next((i for i, mask in enumerate(found) if not mask.any()), len(found))
    return found[:num_left] or InvalidRequest(
        "none of allowed_token_ids can follow in an output of this form", "allowed_token_ids"
    )


def without(mask: Mask, forbidden_ids: Sequence[int]) -> Mask:
    """The mask without these tokens, unless it would be empty: a complete grammar must end."""
    left = mask.copy()
    for token_id in forbidden_ids:
        if token_id // _WORD_BITS >= len(left):
            continue
        left.view(np.uint32)[token_id // _WORD_BITS] &= ~np.uint32(1 << token_id % _WORD_BITS)
    return left if left.any() else mask


class TokenCounts:
    """Each token id that occurred and its count in the output, as parallel arrays.

    Grows with the sequence: a decode step costs one update and no pass over the prompt.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        ids = np.unique(np.asarray(prompt_token_ids, np.int64))
        self._ids = np.resize(ids, 2 * len(ids) + 16)
        self._counts = np.zeros(len(self._ids), np.int64)
        self._places = {token_id: place for place, token_id in enumerate(ids.tolist())}
        self._num_taken = len(prompt_token_ids)

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Count the new outputs among all `token_ids` of the sequence."""
        for token_id in token_ids[self._num_taken :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._ids = np.resize(self._ids, 2 * place)
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._counts[place] += 1
        self._num_taken = len(token_ids)

    def behind(self, token_ids: Sequence[int]) -> TokenCounts:
        """A copy that counts these tokens too."""
        copied = TokenCounts(())
        copied._ids, copied._counts = self._ids.copy(), self._counts.copy()
        copied._places = self._places.copy()
        copied.catch_up(token_ids)
        return copied

    def arrays(self) -> Counts:
        """Valid until tokens are counted again."""
        n = len(self._places)
        return Counts(self._ids[:n], self._counts[:n])
