"""A step is unchanged after transfer from rank to rank, for all contents."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from fakes.combinations.decode_columns import decode_columns
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.core.request.sampling_params import SAMPLING, SamplingParams
from baton.engine.execution.batch import DecodeColumns, SequenceSlice, StepBatch
from baton.engine.execution.constraints import TokenCounts
from baton.engine.parallel.parallel_runner import decode, encode
from baton.kernels.sampling.sample_spec import SampleSpec


def words(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


int32s = st.integers(0, 2**31 - 1)
keys = st.integers(0, 2**64 - 1)
floats = st.floats(-10, 10)
params = st.builds(
    SamplingParams,
    top_k=st.none() | st.integers(1, 1000),
    logit_bias=st.lists(st.tuples(int32s, floats), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    **{
        name: st.sampled_from([one.default, 0.1])
        for name, one in SAMPLING.items()
        if isinstance(one.default, float)
    },
)
counts = st.lists(st.integers(0, 500), max_size=20).map(lambda ids: TokenCounts(ids).arrays())
specs = st.builds(
    SampleSpec,
    st.just(SamplingParams(temperature=0.0)) | params,
    keys,
    st.lists(int32s, max_size=3).map(tuple),
    st.none() | counts,
    st.lists(keys, max_size=3).map(tuple),
    st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5).map(words),
    st.integers(0, 300),
)
slices = st.builds(
    SequenceSlice,
    st.lists(int32s, min_size=1, max_size=5),
    st.integers(0, 2**40),
    st.lists(int32s, min_size=1, max_size=5),
    st.none() | specs,
    follows=st.none() | st.integers(0, 500),
    prompt_targets=st.lists(int32s, max_size=4),
    first_prompt_target=st.integers(0, 5),
    num_prompt_top=st.integers(0, 20),
    adapter_slot=st.none() | st.integers(0, 64),
    draft_samples=st.lists(specs, max_size=3),
    is_prompt=st.booleans(),
    next_token_id=st.none() | int32s,
)


def plain(piece: SequenceSlice) -> dict[str, object]:
    """The fields that the receiving rank uses, in comparable form."""
    fields: dict[str, object] = {
        name: getattr(piece, name) for name in ("start", "follows", "first_prompt_target")
    }
    fields["num_prompt_top"] = piece.num_prompt_top
    fields |= {"adapter_slot": piece.adapter_slot, "is_prompt": piece.is_prompt}
    fields["next_token_id"] = piece.next_token_id
    for name in ("token_ids", "block_table", "prompt_targets"):
        fields[name] = list(getattr(piece, name))
    fields["samples"] = [*map(plain_spec, (piece.sample, *piece.draft_samples))]
    return fields


def plain_spec(spec: SampleSpec | None) -> list[object]:
    if spec is None:
        return []
    allowed = None if spec.allowed is None else spec.allowed.tolist()
    counts = spec.counts
    seen = None if counts is None else (counts.token_ids.tolist(), counts.counts.tolist())
    fields = [spec.params, spec.key, spec.forbidden_ids, spec.fork_keys, spec.num_candidates]
    return [*fields, allowed, seen]


@settings(max_examples=60, deadline=None)
@given(st.lists(slices, min_size=1, max_size=4))
def test_what_arrives_is_what_was_sent(batch: list[SequenceSlice]) -> None:
    assert [plain(piece) for piece in decode(memoryview(encode(batch)))] == list(map(plain, batch))


@given(decode_columns(4), st.lists(slices, max_size=2))
def test_columns_arrive_as_columns(decodes: DecodeColumns, others: list[SequenceSlice]) -> None:
    batch = StepBatch(decodes, others)
    received = decode(memoryview(encode(batch)))
    assert len(received.decodes) == len(decodes)
    assert [*map(plain, received)] == [*map(plain, batch)]
    for name in ("blocks", "temperatures", "special", "alternatives"):
        assert [*getattr(received.decodes, name)] == [*getattr(decodes, name)]


def test_the_counts_may_change_once_they_are_encoded() -> None:
    seen = TokenCounts([1, 2, 2])
    params = SamplingParams(frequency_penalty=0.5)
    spec = SampleSpec(params, 1, counts=seen.arrays())
    message = encode([SequenceSlice([3], 7, [2], spec)])
    seen.catch_up([1, 2, 2, 9, 9])
    (piece,) = decode(memoryview(message))
    assert piece.sample is not None and piece.sample.counts is not None
    assert piece.sample.counts.token_ids.tolist() == [1, 2]
    assert piece.sample.counts.counts.dtype == np.int64


def test_a_decode_step_is_small() -> None:
    """A decode step of 64 sequences of 4096 tokens is little more than its block tables."""
    spec = SampleSpec(dataclasses.replace(SamplingParams(), temperature=0.0), 5)
    batch = [SequenceSlice([1], 4095, list(range(256)), spec)] * 64
    tables_bytes = 64 * 256 * 4
    assert len(encode(batch)) < tables_bytes + 64 * 100
    assert math.isclose(len(encode(batch)) / tables_bytes, 1, abs_tol=0.1)


def test_no_field_of_a_step_is_forgotten() -> None:
    """Every field of a step is sent, or listed here as not needed by other ranks."""
    assert set(SequenceSlice._fields) == {
        "token_ids",
        "start",
        "block_table",
        "sample",
        "follows",
        "prompt_targets",
        "adapter_slot",
        "first_prompt_target",
        "num_prompt_top",
        "draft_samples",
        "is_prompt",
        "next_token_id",
    }
    sent = {"params", "key", "forbidden_ids", "counts", "fork_keys", "allowed", "num_candidates"}
    assert set(SampleSpec._fields) == sent
    judged_by_rank_0 = {
        *("constraint", "max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos"),
        *("min_tokens", "prompt_logprobs", "use_beam_search", "best_of", "early_stopping"),
        *("num_beam_groups", "speculative"),
        "allowed_token_ids",  # sent as `allowed` in the specs
    }
    numbers = {name for name, one in SAMPLING.items() if isinstance(one.default, float)}
    sent = numbers | {"top_k", "logit_bias", "logprobs"}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == judged_by_rank_0 | sent
