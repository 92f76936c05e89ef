"""The input of one step and its sampled tokens. Plain values; tuples where a step has hundreds, as
a frozen dataclass takes three times as long to create.

A step is a flat batch: the tokens of all slices in one row, without padding. Slice i computes
positions [start, start + len(token_ids)) of its sequence; their KV is written to the blocks of its
block table, and attention reads positions 0..start+len-1 through the same table.

    | decodes that differ in numbers alone, in columns | the other decodes | chunks of prompts |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...core.request.sampling_params import SamplingParams
from ...kernels.attention.attention import AttentionMetadata
from ...kernels.sampling.sample_spec import SampleSpec
from ...kernels.sampling.top_logprobs import Candidate

Int64s = NDArray[np.int64]


class SequenceSlice(NamedTuple):
    """One sequence's part of a step. `sample` is None for a chunk that is not the last.

    `follows`: the slice's one token is the sample of that slice of the previous step, which the
    host does not know yet; `token_ids` holds a placeholder. With drafts, the slice's tokens are
    that slice's samples, from the first on. `prompt_targets` are the tokens that follow the
    slice's positions from index `first_prompt_target` on, if their log-probabilities are
    requested, each with `num_prompt_top` alternatives.

    `draft_samples`: as many tokens after the slice's first are drafts, and a token is sampled
    before each: `draft_samples[i]` samples what draft i must equal, `sample` what follows the last.
    `is_prompt`: the tokens were known at admission, and a draft model computes their KV too, unless
    it lacks that of earlier tokens. `next_token_id`: the known token after a prompt's slice that
    samples nothing; a draft head reads it.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleSpec | None
    follows: int | None = None
    prompt_targets: Sequence[int] = ()
    first_prompt_target: int = 0
    num_prompt_top: int = 0
    adapter_slot: int | None = None  # the slot of its LoRA adapter
    draft_samples: Sequence[SampleSpec] = ()
    is_prompt: bool = False
    next_token_id: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecodeColumns:
    """Slices of one token each that sample the next by `params` and `keys`, as parallel columns.
    `blocks` are the KV blocks of the tokens; `follows` is -1 where a token is known.

    Rows in `special` need more than a temperature, those in `alternatives` return several tokens.
    `specs` has the rows whose sequences add to their parameters: a history, or tokens that are left
    out.
    """

    token_ids: Int64s
    starts: Int64s
    blocks: Int64s
    follows: Int64s
    keys: NDArray[np.uint64]
    temperatures: NDArray[np.float64]
    params: Sequence[SamplingParams] = ()
    block_tables: Sequence[Sequence[int]] = ()
    adapter_slots: Sequence[int | None] = ()
    special: Sequence[int] = ()
    alternatives: Sequence[int] = ()
    specs: Mapping[int, SampleSpec] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.params)

    def spec(self, row: int) -> SampleSpec:
        return self.specs.get(row) or SampleSpec(self.params[row], int(self.keys[row]))

    def slice(self, row: int) -> SequenceSlice:
        """The row as a slice, for runners that use no columns."""
        follows = int(self.follows[row])
        return SequenceSlice(
            (int(self.token_ids[row]),),
            int(self.starts[row]),
            self.block_tables[row],
            self.spec(row),
            None if follows < 0 else follows,
            adapter_slot=self.adapter_slots[row],
        )


_NO_NUMBERS = np.zeros(0, np.int64)
NO_DECODES = DecodeColumns(
    *(_NO_NUMBERS,) * 4, _NO_NUMBERS.view(np.uint64), _NO_NUMBERS.view(np.float64)
)


@dataclass(frozen=True, eq=False)
class StepBatch(Sequence[SequenceSlice]):
    """All slices of a step: `decodes`, followed by `others`, decodes first.

    A sampled token is a row: one row for each of `decodes`, followed by those of `others`, where a
    slice with drafts has several and a chunk that is not the last has none.
    """

    decodes: DecodeColumns
    others: Sequence[SequenceSlice]

    @classmethod
    def of(cls, batch: Sequence[SequenceSlice]) -> StepBatch:
        return batch if isinstance(batch, StepBatch) else cls(NO_DECODES, batch)

    def __len__(self) -> int:
        return len(self.decodes) + len(self.others)

    def __getitem__(self, index: Any) -> Any:
        return self._slices[index]

    @cached_property
    def _slices(self) -> list[SequenceSlice]:
        return [*map(self.decodes.slice, range(len(self.decodes))), *self.others]

    @cached_property
    def query_lens(self) -> list[int]:
        return [1] * len(self.decodes) + [len(piece.token_ids) for piece in self.others]

    @cached_property
    def seq_lens(self) -> list[int]:
        ends = [piece.start + len(piece.token_ids) for piece in self.others]
        return [*(self.decodes.starts + 1).tolist(), *ends]

    @property
    def adapter_slots(self) -> list[int | None]:
        return [*self.decodes.adapter_slots, *(piece.adapter_slot for piece in self.others)]

    @cached_property
    def num_decodes(self) -> int:
        """Leading slices that are decodes: one token, followed by its drafts."""
        for index, piece in enumerate(self.others, len(self.decodes)):
            if len(piece.token_ids) != 1 + len(piece.draft_samples):
                return index
        return len(self)

    def flatten(self, block_size: int) -> Int64s:
        """[3, tokens]: token ids, positions, slots (block_id * block_size + offset)."""
        decodes, n = self.decodes, len(self.decodes)
        arrays = np.empty((3, sum(self.query_lens)), np.int64)
        offsets = decodes.starts % block_size
        arrays[:, :n] = decodes.token_ids, decodes.starts, decodes.blocks * block_size + offsets
        if self.others:
            self._flatten_others(arrays[:, n:], block_size)
        return arrays

    def _flatten_others(self, arrays: Int64s, block_size: int) -> None:
        """Vectorised, as there may be many decodes with drafts."""
        token_ids, positions, slots = arrays
        lens = self.query_lens[len(self.decodes) :]
        blocks: list[int] = []
        block_offsets = []  # from a position's block number to its index in `blocks`
        for piece, n in zip(self.others, lens, strict=True):
            first, last = piece.start // block_size, (piece.start + n - 1) // block_size
            block_offsets.append(len(blocks) - first)
            blocks += piece.block_table[first : last + 1]
        ids = chain.from_iterable(piece.token_ids for piece in self.others)
        token_ids[:] = np.fromiter(ids, np.int64, len(token_ids))
        counts = np.array(lens)
        begins = np.array([piece.start for piece in self.others]) - (np.cumsum(counts) - counts)
        positions[:] = np.arange(len(positions)) + np.repeat(begins, counts)
        places = positions // block_size + np.repeat(block_offsets, counts)
        slots[:] = np.array(blocks)[places] * block_size + positions % block_size

    def metadata(
        self, slots: Tensor, *, is_graph: bool = False, graph_decodes: int | None = None
    ) -> AttentionMetadata:
        """The input of attention's plan; `slots` [tokens] are on the device."""
        return AttentionMetadata(
            query_lens=self.query_lens,
            seq_lens=self.seq_lens,
            block_tables=[*self.decodes.block_tables, *(one.block_table for one in self.others)],
            slot_mapping=slots,
            num_decodes=self.num_decodes,
            is_graph=is_graph,
            graph_decodes=graph_decodes,
        )

    @cached_property
    def logits_indices(self) -> list[int]:
        """For each row, the index of its token in the step."""
        end = len(self.decodes)
        indices = [*range(end)]
        for piece in self.others:
            end += len(piece.token_ids)
            if piece.sample is not None:
                indices.extend(range(end - 1 - len(piece.draft_samples), end))
        return indices

    @cached_property
    def specs(self) -> list[SampleSpec]:
        """How the rows of `others` are sampled."""
        found = list[SampleSpec]()
        for piece in self.others:
            if piece.sample is not None:
                found.extend((*piece.draft_samples, piece.sample))
        return found

    def spec(self, row: int) -> SampleSpec:
        """How the row is sampled."""
        n = len(self.decodes)
        return self.decodes.spec(row) if row < n else self.specs[row - n]

    @property
    def alternatives(self) -> list[int]:
        """Rows that return more than a token."""
        n, alternatives = len(self.decodes), list(self.decodes.alternatives)
        for row, spec in enumerate(self.specs, n):
            if spec.fork_keys or spec.params.logprobs or spec.num_candidates:
                alternatives.append(row)
        return alternatives

    @property
    def has_extras(self) -> bool:
        """Whether any slice returns more than a token a row: see extras.py."""
        return bool(self.alternatives) or any(piece.prompt_targets for piece in self.others)

    def results(self, tokens: Sequence[SampledToken]) -> list[SampledToken | None]:
        """The rows' `tokens` by slice; all None without tokens, as of a stage that samples none."""
        if not tokens:
            return [None] * len(self)
        rows = iter(tokens)
        results: list[SampledToken | None] = [*islice(rows, len(self.decodes))]
        for piece in self.others:
            if piece.sample is None:
                results.append(None)
            else:
                at_drafts = tuple(islice(rows, len(piece.draft_samples)))
                last = next(rows)
                results.append(last._replace(at_drafts=at_drafts) if at_drafts else last)
        return results


class SampledToken(NamedTuple):
    """One sampled token and its log-probability under the model's own distribution.

    A `logprob` of NaN: the logits were no distribution, and the token is invalid. `top` are the
    likeliest (token id, logprob), as many as were requested; `forks` the further samples;
    `candidates` those of a beam, best first, equals by id; `at_drafts` the tokens sampled before it
    by the slice's `draft_samples`.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    forks: tuple[SampledToken, ...] = ()
    at_drafts: tuple[SampledToken, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    @staticmethod
    def many(token_ids: Sequence[int], logprobs: Sequence[float]) -> list[SampledToken]:
        """The tokens of a step, in less time than one by one."""
        nothing = repeat(())
        rows = zip(token_ids, logprobs, *(nothing,) * 4)  # noqa: B905 (the last have no end)
        return [*map(partial(tuple.__new__, SampledToken), rows)]
