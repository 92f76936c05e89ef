"""The clear decodes of a step as columns, which live from step to step: what is known of a sequence
is looked up when it joins them, and a block when it begins.

    rows of the last step     a  b  c  d
    of this one               a  c  d  e     those that stay are a token further
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Row
from dataclasses import replace
from itertools import count, repeat
from typing import Any

import numpy as np

from ..core.request.request import key_at
from .execution.batch import NO_DECODES, DecodeColumns, Int64s
from .execution.constraints import Mask
from .scheduling.sequence import Sequence
from .step_slices import sample_spec

# `place`: of the start's block in the block table. `draws`: whether `key`, the sample's, matters.
_ROW = np.dtype(
    [
        *((name, np.int64) for name in ("start", "place", "block")),
        *(("key", np.uint64), ("draws", bool), ("temperature", np.float64)),
        *(("is_special", bool), ("is_asking", bool), ("adds", bool)),
    ]
)


class DecodeBatch:
    """Of one engine."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sequences: list[Sequence] = []
        self._rows: Any = np.zeros(0, _ROW)
        self._columns = NO_DECODES  # what stays as long as the sequences do
        self._adding: list[int] = []

    def launch(
        self,
        sequences: list[Sequence],
        previous: Mapping[Sequence, int],
        masks: Mapping[Sequence, Row[Mask]],
        eos_token_ids: Collection[int],
    ) -> DecodeColumns:
        """What to launch of each, which takes note of it: its next token. See `launch_slices`."""
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
        specs = {
            row: sample_spec(one, end, masks.get(one, ()), eos_token_ids)
            for row, one, end in adding
        }
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
        """The starts of this step: each sequence was launched since those of the last."""
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
            asking=np.flatnonzero(rows["is_asking"]).tolist(),
        )


def _row_of(sequence: Sequence) -> tuple[Any, ...]:
    """Of one that joins, as if it had been in the last step."""
    params, key = sequence.sampling, sequence.sample_key
    drawn = (key or 0, key is not None, params.temperature)
    adds = sequence.adds_to_specs
    is_special, is_asking = not adds and params.needs_more_than_noise, bool(params.logprobs)
    return (sequence.num_launched_tokens - 1, -1, 0, *drawn, is_special, is_asking, adds)
