"""Several ranks as one Runner: every step is sent to the other ranks, then launched on rank 0.

    launch ──► step message to ranks 1, 2, ...          all launch the same step, in the same order
           └─► this rank's runner ──► collect           all ranks have the same results

All ranks sample the same token from the same bits, so a step that follows another step needs no
token from rank 0. When rank 0's step has completed, every rank has written the step's KV: the last
all-reduce of the step needs all ranks.

A step is sent as MessagePack: the columns of its decodes, and a list of the other slices, each as
the fields of a SequenceSlice. Columns are raw bytes: tokens and targets uint32, block ids int32.
The message is not validated: both ends belong to one engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from ...core.request.request import TokenLogprobs
from ...core.request.sampling_params import SAMPLING, SamplingParams
from ...kernels.attention.attention import join_tables
from ...kernels.sampling.sample_spec import Counts, SampleSpec
from ..execution.batch import DecodeColumns, SampledToken, SequenceSlice, StepBatch
from ..execution.runner_protocols import Drafter, LaunchedStep, Runner
from .rank_channel import MessageKind
from .rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class _ParallelStep:
    """A step that all ranks have launched."""

    mine: LaunchedStep
    followers: RankGroup

    @property
    def number(self) -> int:
        return self.mine.number

    @property
    def device_s(self) -> float | None:
        return self.mine.device_s

    def has_completed(self) -> bool:
        self.followers.check()  # a device that waits for a lost rank never completes
        with self.followers.explaining:
            return self.mine.has_completed()

    def collect(self) -> list[SampledToken | None]:
        with self.followers.explaining:
            return self.mine.collect()

    def prompt_logprobs(self) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        return self.mine.prompt_logprobs()


class ParallelRunner:
    """`mine`: rank 0's runner. A step that fails raises the error that the failed rank sent."""

    def __init__(self, mine: Runner, followers: RankGroup) -> None:
        self._mine, self._followers = mine, followers
        self.runs_ahead = mine.runs_ahead

    def launch(self, batch: Sequence[SequenceSlice]) -> LaunchedStep:
        self._followers.send(MessageKind.STEP, encode(batch))
        with self._followers.explaining:
            return _ParallelStep(self._mine.launch(batch), self._followers)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The other ranks copy before they run any message sent later."""
        self._followers.send(MessageKind.COPY_BLOCKS, np.array(pairs, np.int64).T.tobytes())
        self._mine.copy_blocks(pairs)


class RankedDrafter:
    """A Drafter of all ranks: each has its part of the draft model, and all draw the same tokens.
    `mine`: rank 0's."""

    def __init__(self, mine: Drafter, followers: RankGroup) -> None:
        self._mine, self._followers = mine, followers

    def draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        self._followers.send(MessageKind.DRAFT, encode(batch))
        with self._followers.explaining:
            return self._mine.draft(batch)


# The sampling parameters that a sampler reads; rank 0 alone handles the others. All but the
# temperature are sent only if at least one of them is set.
_PARAMETERS = [
    *(name for name, one in SAMPLING.items() if isinstance(one.default, float)),
    *("top_k", "logprobs", "logit_bias"),
]
_PARAMETERS.sort(key="temperature".__ne__)  # to the front
_values_of = attrgetter(*_PARAMETERS)
_UNSET = _values_of(SamplingParams())[1:]

_encoder = msgspec.msgpack.Encoder(enc_hook=bytes)  # of arrays
_decoder = msgspec.msgpack.Decoder()


def encode(batch: Sequence[SequenceSlice]) -> bytes:
    """Encode a step as a message; the token counts of penalties are copied."""
    batch = StepBatch.of(batch)
    others = [
        piece._replace(
            token_ids=array("I", piece.token_ids),
            block_table=array("i", piece.block_table),
            sample=None if piece.sample is None else _sent(piece.sample),
            prompt_targets=array("I", piece.prompt_targets),
            draft_samples=[*map(_sent, piece.draft_samples)],
        )
        for piece in batch.others
    ]
    return _encoder.encode((_sent_columns(batch.decodes), others))


def _sent_columns(decodes: DecodeColumns) -> tuple[Any, ...]:
    numbers = (decodes.token_ids, decodes.starts, decodes.blocks, decodes.follows, decodes.keys)
    few = {*decodes.special, *decodes.alternatives}  # the other rows need only their temperature
    params = [(row, _values_of(decodes.params[row])) for row in few]
    tables = join_tables(decodes.block_tables)
    specs = [(row, _sent(spec)) for row, spec in decodes.specs.items()]
    few_rows = (params, decodes.special, decodes.alternatives, specs)
    return (*numbers, decodes.temperatures, *tables, decodes.adapter_slots, *few_rows)


def _sent(spec: SampleSpec) -> Any:
    """The spec with the values of its parameters in their place."""
    values = _values_of(spec.params)
    return (values[:1] if values[1:] == _UNSET else values, *spec[1:])


def decode(message: memoryview) -> StepBatch:
    """Decode a step; its arrays are views of the message."""
    columns, slices = _decoder.decode(message)
    return StepBatch(_received_columns(*columns), [_received_slice(*one) for one in slices])


def _received_slice(*fields: Any) -> SequenceSlice:
    sent = SequenceSlice(*fields)
    return sent._replace(
        token_ids=memoryview(fields[0]).cast("I"),
        block_table=memoryview(fields[2]).cast("i"),
        sample=None if sent.sample is None else _received(*sent.sample),
        prompt_targets=memoryview(fields[5]).cast("I"),
        draft_samples=[_received(*one) for one in sent.draft_samples],
    )


def _received_columns(*columns: Any) -> DecodeColumns:
    *numbers, keys, temperatures, indptr, indices, slots, params, special, alternatives, specs = (
        columns
    )
    token_ids, starts, blocks, follows = (np.frombuffer(one, np.int64) for one in numbers)
    temperatures = np.frombuffer(temperatures, np.float64)
    of_rows = [*map(_of_temperature, temperatures.tolist())]
    for row, values in params:
        of_rows[row] = _params(values)
    tables, ends = memoryview(indices).cast("i"), np.frombuffer(indptr, np.int32).tolist()
    return DecodeColumns(
        *(token_ids, starts, blocks, follows),
        np.frombuffer(keys, np.uint64),
        temperatures,
        of_rows,
        [tables[begin:end] for begin, end in pairwise(ends)],
        slots,
        special,
        alternatives,
        {row: _received(*spec) for row, spec in specs},
    )


@lru_cache
def _of_temperature(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature)


def _params(values: list[Any]) -> SamplingParams:
    if len(values) == 1:
        return _of_temperature(values[0])
    *numbers, bias = values
    given = dict(zip(_PARAMETERS, numbers, strict=False))
    return SamplingParams(**given, logit_bias=tuple(map(tuple, bias)))


def _received(values: Any, *fields: Any) -> SampleSpec:
    sent = SampleSpec(_params(values), *fields)
    counts, allowed = sent.counts, sent.allowed
    return sent._replace(
        forbidden_ids=tuple(sent.forbidden_ids),
        counts=counts and Counts(*(np.frombuffer(one, np.int64) for one in counts)),
        fork_keys=tuple(sent.fork_keys),
        allowed=None if allowed is None else np.frombuffer(allowed, np.int32),
    )
