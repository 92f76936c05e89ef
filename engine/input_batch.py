"""The batch of a step: from the scheduler's plan to what the runner launches.

    | clear decodes, as columns that persist between steps | other decodes | chunks of prompts |

The parameters of a clear decode are read when it joins the columns, its block when one begins:

    rows of the previous step     a  b  c  d
    rows of this step             a  c  d  e     rows that stay advance by one token
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Row
from dataclasses import replace
from itertools import count, repeat
from typing import Any

import numpy as np

from ..core.request.request import key_at, token_key
from ..kernels.sampling.sample_spec import SampleSpec, needs_more_than_noise
from .execution.batch import NO_DECODES, DecodeColumns, Int64s, SequenceSlice, StepBatch
from .execution.constraints import without
from .scheduling.schedule import Schedule
from .scheduling.sequence import Sequence

_AWAITED = (0,)  # in place of a token that the host does not know yet
# `place`: index of the start's block in the block table. `draws`: whether `key` is used.
_ROW = np.dtype(
    [
        *((name, np.int64) for name in ("start", "place", "block")),
        *(("key", np.uint64), ("draws", bool), ("temperature", np.float64)),
        *(("is_special", bool), ("has_alternatives", bool), ("adds", bool)),
    ]
)


class InputBatch:
    """The input batch of one engine."""

    def __init__(self, block_size: int, eos_token_ids: Collection[int]) -> None:
        self._block_size = block_size
        self._eos_token_ids = eos_token_ids
        self._sequences: list[Sequence] = []
        self._rows: Any = np.zeros(0, _ROW)
        self._columns = NO_DECODES  # what changes only with the sequences
        self._adding: list[int] = []

    def launch(self, schedule: Schedule, previous: Mapping[Sequence, int]) -> StepBatch:
        """The batch of a schedule; its tokens are counted as launched in their sequences.

        `previous`: each sequence's slice in the step in flight, whose sample is its next token.
        """
        decodes = self._launch_clear(schedule.clear, previous)
        return StepBatch(decodes, [self._launch_slice(*one, previous) for one in schedule.others])

    def _launch_clear(
        self, sequences: list[Sequence], previous: Mapping[Sequence, int]
    ) -> DecodeColumns:
        """The next token of each clear decode."""
        is_same = sequences == self._sequences
        if not is_same:
            self._change_to(sequences)
        rows, starts = self._rows, self._advance()
        token_ids, follows = np.zeros_like(starts), np.arange(len(rows))
        if not (is_same and previous):
            follows[:] = [*map(previous.get, sequences, repeat(-1))]
            for row in np.flatnonzero(follows < 0).tolist():
                token_ids[row] = sequences[row].token_ids[starts[row]]
        adding = [(row, sequences[row], int(starts[row]) + 1) for row in self._adding]
        specs = {row: self._spec(one, end) for row, one, end in adding}
        for one in sequences:
            one.num_launched_tokens += 1
            one.num_awaited_tokens += 1
        positions: Any = (starts + 1).view(np.uint64)
        return replace(
            self._columns,
            token_ids=token_ids,
            starts=starts,
            blocks=rows["block"].copy(),
            follows=follows,
            keys=key_at(rows["key"], positions) * rows["draws"],
            specs=specs,
        )

    def _advance(self) -> Int64s:
        """The starts of this step, one token after the previous step's; updates `block`."""
        rows, tables = self._rows, self._columns.block_tables
        starts: Int64s = rows["start"] + 1
        places = starts // self._block_size
        for row in np.flatnonzero(places != rows["place"]).tolist():
            rows["block"][row] = tables[row][places[row]]
        rows["start"], rows["place"] = starts, places
        return starts

    def _change_to(self, sequences: list[Sequence]) -> None:
        before = dict(zip(self._sequences, count()))
        index = np.array([*map(before.get, sequences, repeat(-1))], np.int64)
        rows = self._rows[index] if before else np.zeros(len(index), _ROW)
        for row in np.flatnonzero(index < 0).tolist():
            rows[row] = _row_of(sequences[row])
        self._sequences, self._rows = sequences, rows
        self._adding = np.flatnonzero(rows["adds"]).tolist()
        self._columns = replace(
            NO_DECODES,
            temperatures=rows["temperature"].copy(),
            params=[one.sampling for one in sequences],
            block_tables=[one.block_ids for one in sequences],
            adapter_slots=[one.adapter_slot for one in sequences],
            special=np.flatnonzero(rows["is_special"]).tolist(),
            alternatives=np.flatnonzero(rows["has_alternatives"]).tolist(),
        )

    def _launch_slice(
        self, sequence: Sequence, num_tokens: int, previous: Mapping[Sequence, int]
    ) -> SequenceSlice:
        """The slice of `num_tokens` of a sequence. With drafts it is the last token followed by the
        drafts, and a token is sampled before each draft too."""
        start, num_known = sequence.num_launched_tokens, len(sequence.token_ids)
        end, drafts = start + num_tokens, sequence.draft_token_ids
        is_prompt = start < sequence.num_prefill_tokens
        is_awaited = start == num_known
        token_ids: Row[int] = _AWAITED if is_awaited else sequence.token_ids[start:end]
        draft_samples: Row[SampleSpec] = ()
        if drafts:
            assert start == num_known - 1, "drafts follow a token that is known"
            token_ids = [*token_ids, *drafts]
            draft_samples = [
                self._spec(sequence, num_known + place, drafts[:place])
                for place in range(len(drafts))
            ]
        follows = previous[sequence] if is_awaited else None
        sample = next_token_id = None
        if end == num_known + sequence.num_awaited_tokens + len(drafts):
            sample = self._spec(sequence, end, drafts)
            sequence.num_awaited_tokens += sequence.awaits_tokens
        elif end < num_known:
            next_token_id = sequence.token_ids[end]
        sequence.num_launched_tokens = end
        targets: Row[int] = ()
        first_target = num_top = 0
        if is_prompt and sequence.needs_prompt_logprobs:
            first = max(start + 1, sequence.next_prompt_logprob)
            targets = sequence.request.prompt_token_ids[first : end + 1]
            first_target = first - start - 1
            num_top = sequence.sampling.prompt_logprobs or 0
        return SequenceSlice(
            token_ids,
            start,
            sequence.block_ids,
            sample,
            follows,
            targets,
            first_target,
            num_top,
            sequence.adapter_slot,
            draft_samples,
            is_prompt=is_prompt and sequence.num_drafted_tokens >= start,
            next_token_id=next_token_id,
        )

    def _spec(self, sequence: Sequence, position: int, drafts: Row[int] = ()) -> SampleSpec:
        """How to sample the token at `position`, which follows `drafts`; if it is the first output,
        for the forks too."""
        request = sequence.request
        params = request.sampling
        key = 0 if sequence.sample_key is None else key_at(sequence.sample_key, position)
        is_too_early = position < len(request.prompt_token_ids) + params.min_tokens
        forbidden = (*self._eos_token_ids, *params.stop_token_ids) if is_too_early else ()
        allowed = sequence.masks[len(drafts)] if sequence.masks else sequence.allowed
        if allowed is not None:
            allowed, forbidden = without(allowed, forbidden), ()
        seen = sequence.counts()
        if seen is not None and drafts:
            seen = seen.behind(drafts)
        counts = None if seen is None else seen.arrays()
        fork_keys: tuple[int, ...] = ()
        if sequence.forks and position == request.num_known_tokens:
            indices = [fork.sample_index for fork in sequence.forks]
            fork_keys = tuple(token_key(params.seed, index, position) for index in indices)
        return SampleSpec(
            params, key, forbidden, counts, fork_keys, allowed, sequence.num_candidates
        )


def _row_of(sequence: Sequence) -> tuple[Any, ...]:
    """The row of a sequence that joins the columns, as if it had been in the previous step."""
    params, key = sequence.sampling, sequence.sample_key
    drawn = (key or 0, key is not None, params.temperature)
    adds = sequence.adds_to_specs
    is_special, has_alternatives = not adds and needs_more_than_noise(params), bool(params.logprobs)
    return (sequence.num_launched_tokens - 1, -1, 0, *drawn, is_special, has_alternatives, adds)
