"""The input batch of a step: decodes held in columns are equal to the slices of each sequence."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from baton.core.request.request import Request, token_key
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import BlockHash
from baton.engine.execution.batch import SequenceSlice
from baton.engine.input_batch import InputBatch
from baton.engine.scheduling.schedule import Schedule, ScheduledSequence
from baton.engine.scheduling.sequence import Sequence

BLOCK_SIZE = 4
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.7)),
    seed=st.integers(0, 2**64 - 1),
    top_k=st.none() | st.just(3),
    logprobs=st.none() | st.just(2),
    min_tokens=st.sampled_from((0, 4)),
)


def decoding(number: int, sampling: SamplingParams) -> Sequence:
    """A sequence whose prompt is computed and whose first token is known."""
    length = 1 + number * 3
    sequence = Sequence(
        Request(f"{number:032x}", 0, tuple(range(length)), sampling, sample_index=number),
        number,
        False,
        BlockHash(b""),
    )
    sequence.token_ids.append(100 + number)
    sequence.num_prefill_tokens = sequence.num_launched_tokens = length
    sequence.block_ids = array("i", range(1000 * number, 1000 * number + 40))
    sequence.adapter_slot = None if number % 2 else number
    return sequence


def comparable(piece: SequenceSlice) -> SequenceSlice:
    return piece._replace(token_ids=[*piece.token_ids])


def launch_both(
    columns: InputBatch, pairs: list[tuple[Sequence, Sequence]], places: dict[int, int]
) -> None:
    """Launch the same sequences as columns and as slices; `places`: rows in flight, by arrival."""
    own, others = [one for one, _ in pairs], [one for _, one in pairs]
    awaited = {one: places[one.arrival] for one in own if one.arrival in places}
    launched = columns.launch(Schedule(0, clear=own), awaited).decodes
    awaited = {one: places[one.arrival] for one in others if one.arrival in places}
    planned = [ScheduledSequence(one, 1) for one in others]
    by_slices = InputBatch(BLOCK_SIZE, (7,))
    expected = by_slices.launch(Schedule(0, others=planned), awaited).others
    found = map(launched.slice, range(len(launched)))
    assert [*map(comparable, found)] == [*map(comparable, expected)]
    offsets = launched.starts // BLOCK_SIZE
    tables = [one.block_ids for one in others]
    blocks = [table[place] for table, place in zip(tables, offsets.tolist(), strict=True)]
    assert launched.blocks.tolist() == blocks
    assert [*launched.special] == [i for i, one in enumerate(others) if is_filtered(one.sampling)]
    assert [*launched.alternatives] == [i for i, one in enumerate(others) if one.sampling.logprobs]


def is_filtered(sampling: SamplingParams) -> bool:
    return not sampling.min_tokens and sampling.top_k is not None and sampling.temperature > 0


@given(st.data(), st.lists(params, min_size=1, max_size=6))
def test_columns_are_the_slices_of_each(
    data: st.DataObject, requested: list[SamplingParams]
) -> None:
    """Columns equal slices as sequences come and go, with and without a step in flight."""
    pairs = [(decoding(i, one), decoding(i, one)) for i, one in enumerate(requested)]
    columns, in_flight = InputBatch(BLOCK_SIZE, (7,)), list[int]()
    chosen = [*range(len(pairs))]
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            chosen = sorted(data.draw(st.sets(st.integers(0, len(pairs) - 1))))
        is_ahead = data.draw(st.booleans())
        if not is_ahead:
            collect(pairs, in_flight)
        places = {} if not is_ahead else {index: place for place, index in enumerate(in_flight)}
        launch_both(columns, [pairs[index] for index in chosen], places)
        if is_ahead:
            collect(pairs, in_flight)
        in_flight = [*chosen]


def collect(pairs: list[tuple[Sequence, Sequence]], in_flight: list[int]) -> None:
    for one in (one for index in in_flight for one in pairs[index]):
        one.num_awaited_tokens -= 1
        one.num_computed_tokens += 1
        one.token_ids.append(500 + one.num_tokens)
    in_flight.clear()


seeds = st.none() | st.integers(0, 2**64 - 1)  # None: greedy


@given(st.lists(st.tuples(seeds, st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=9))
def test_each_token_is_drawn_by_its_key(requested: list[tuple[int | None, int, int]]) -> None:
    sequences = []
    for number, (seed, sample_index, length) in enumerate(requested):
        params = SamplingParams(temperature=float(seed is not None), seed=seed or 0)
        prompt = tuple(range(length))
        request = Request(f"{number:032x}", 0, prompt, params, sample_index=sample_index)
        sequences.append(Sequence(request, number, False, BlockHash(b"")))
        sequences[-1].block_ids = array("i", [2])
        sequences[-1].num_prefill_tokens = length
    planned = [ScheduledSequence(one, one.num_tokens) for one in sequences]
    batch = InputBatch(BLOCK_SIZE, ()).launch(Schedule(0, others=planned), {})
    for piece, (seed, sample_index, length) in zip(batch.others, requested, strict=True):
        assert piece.sample is not None
        key = 0 if seed is None else token_key(seed, sample_index, length)
        assert piece.sample.key == key and type(piece.sample.key) is int
