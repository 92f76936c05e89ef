"""The runner against transformers in float32: logits, greedy tokens, every chunking, any blocks."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VARIANTS, write_checkpoint
from engines.steps import execute
from rounding import assert_same_but_for_rounding
from transformers import DynamicCache, PreTrainedModel

from baton.core.engine_config import EngineConfig
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SampledToken, SequenceSlice, StepBatch
from baton.engine.execution.cpu_steps import CpuSteps
from baton.engine.execution.runner import ModelRunner
from baton.kernels.sampling.sample_spec import SampleSpec

BLOCK_SIZE, NUM_BLOCKS = 16, 80
GREEDY = SampleSpec(SamplingParams(temperature=0.0), key=0)


@dataclass
class Pair:
    """One checkpoint in transformers and in our runner."""

    theirs: PreTrainedModel
    ours: ModelRunner

    def prompt(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(self.ours.model_config.vocab_size) for _ in range(length)]

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """The logits of transformers, [tokens, vocab]."""
        with torch.inference_mode():
            return self.theirs(torch.tensor([token_ids])).logits[0]

    def check(self, prompt: list[int], sampled: list[SampledToken | None]) -> None:
        """Check that `sampled` is transformers' greedy continuation, with log-probabilities."""
        tokens = [token for token in sampled if token is not None]
        assert len(tokens) == len(sampled)
        rows = self.logits(prompt + [token.token_id for token in tokens])[len(prompt) - 1 : -1]
        assert [token.token_id for token in tokens] == rows.argmax(-1).tolist()
        wanted = rows.log_softmax(-1).amax(-1).tolist()
        assert [token.logprob for token in tokens] == pytest.approx(wanted, abs=1e-4)


def make_runner(folder: Path, **changes: Any) -> ModelRunner:
    settings = {"device": "cpu", "block_size": BLOCK_SIZE, "num_kv_blocks": NUM_BLOCKS} | changes
    return ModelRunner(EngineConfig(model=str(folder), **settings))


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("checkpoint")
    variant = VARIANTS[request.param]
    theirs = write_checkpoint(folder, seed=1, has_varied_vectors=True, **variant)
    return Pair(theirs, make_runner(folder))


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


class Blocks:
    """Scattered block tables of one pool."""

    def __init__(self, rng: random.Random) -> None:
        self._ids = rng.sample(range(2, NUM_BLOCKS), NUM_BLOCKS - 2)

    def table(self, num_tokens: int) -> list[int]:
        return [self._ids.pop() for _ in range(math.ceil(num_tokens / BLOCK_SIZE))]


def chunks(token_ids: list[int], table: list[int], size: int) -> Iterator[SequenceSlice]:
    """A prompt in chunks; the last one samples."""
    for start in range(0, len(token_ids), size):
        end = min(start + size, len(token_ids))
        sample = GREEDY if end == len(token_ids) else None
        yield SequenceSlice(token_ids[start:end], start, table, sample)


def test_logits_equal_transformers(pair: Pair, rng: random.Random) -> None:
    token_ids = pair.prompt(rng, 150)
    piece = SequenceSlice(token_ids, 0, Blocks(rng).table(150), None)
    steps = pair.ours._steps
    assert isinstance(steps, CpuSteps)
    steps = pair.ours._steps
    assert isinstance(steps, CpuSteps)
    with torch.inference_mode():
        ours = steps.model.lm_head.project(steps._forward(StepBatch.of([piece])))
    theirs = pair.logits(token_ids)
    scale = float(theirs.abs().max())
    assert scale > 1  # the logits are not trivial
    assert float((ours - theirs).abs().max()) <= 1e-4 * max(1.0, scale / 10)


CHUNKS = [1, 7, 16, 24, 1000]
# These (windows, RoPE by position, experts in some layers) get all chunk sizes, the others two.
CHUNKED = {
    *("llama, gqa 4:2", "mistral, window", "qwen2, yarn, window of the upper layers"),
    *("qwen3, biases, window by layer_types", "qwen3-moe, a dense layer"),
}


@pytest.mark.parametrize(
    ("pair", "size"),
    [
        pytest.param(name, size, marks=() if is_quick else pytest.mark.slow)
        for name in VARIANTS
        for size in CHUNKS
        for is_quick in [name in CHUNKED or size in (7, 1000)]
    ],
    indirect=["pair"],
    scope="module",
)
def test_chunked_prefill_then_greedy_decode(pair: Pair, rng: random.Random, size: int) -> None:
    token_ids = pair.prompt(rng, 53)
    table, outputs = Blocks(rng).table(80), list[SampledToken | None]()
    for piece in chunks(token_ids, table, size):
        (sampled,) = execute(pair.ours, [piece])
        assert (sampled is None) == (piece.sample is None)
    for position in range(53, 65):
        assert sampled is not None
        outputs.append(sampled)
        piece = SequenceSlice([sampled.token_id], position, table, GREEDY)
        (sampled,) = execute(pair.ours, [piece])
    pair.check(token_ids, outputs)


def test_mixed_batches_of_decodes_and_chunks(pair: Pair, rng: random.Random) -> None:
    blocks = Blocks(rng)
    sequences = [(pair.prompt(rng, n), blocks.table(n + 8)) for n in (5, 33, 64, 17, 90)]
    waiting = [list(chunks(ids, table, 19)) for ids, table in sequences]
    tokens = [list(ids) for ids, _ in sequences]
    outputs: list[list[SampledToken | None]] = [[] for _ in sequences]
    while min(map(len, outputs)) < 6:
        running = [i for i in range(len(sequences)) if len(outputs[i]) < 6]
        members = rng.sample(running, rng.randint(1, len(running)))
        batch = [
            waiting[i].pop(0)
            if waiting[i]
            else SequenceSlice(tokens[i][-1:], len(tokens[i]) - 1, sequences[i][1], GREEDY)
            for i in members
        ]
        results = execute(pair.ours, batch)
        for i, piece, sampled in zip(members, batch, results, strict=True):
            assert (sampled is None) == (piece.sample is None)
            if sampled is not None:
                outputs[i].append(sampled)
                tokens[i].append(sampled.token_id)
    for (prompt, _), output in zip(sequences, outputs, strict=True):
        pair.check(prompt, output)


def decode_logprob(pair: Pair, tokens: list[int], table: list[int]) -> float:
    """The log-probability reported by one decode step over the pool's current content."""
    piece = SequenceSlice(tokens[-1:], len(tokens) - 1, table, GREEDY)
    (sampled,) = execute(pair.ours, [piece])
    assert sampled is not None
    return sampled.logprob


def test_every_block_matters(pair: Pair, rng: random.Random) -> None:
    """A zeroed, swapped or shifted block changes the result, so the tests above do cover each
    block.

    A block that is outside of every layer's window may hold anything.
    """
    tokens = pair.prompt(rng, 70)
    table = Blocks(rng).table(70)
    execute(pair.ours, [SequenceSlice(tokens[:-1], 0, table, None)])
    healthy = decode_logprob(pair, tokens, table)
    pool = pair.ours.kv.tensor
    windows = pair.ours.model_config.windows
    first_seen = 0 if None in windows else len(tokens) - max(size or 0 for size in windows)
    for index, block in enumerate(table):
        saved = pool[block].clone()
        if (index + 1) * BLOCK_SIZE <= first_seen:
            pool[block] = math.nan
            assert decode_logprob(pair, tokens, table) == healthy
            pool[block] = saved
            continue
        shifted = saved.flatten().roll(saved.shape[-1]).view(saved.shape)  # by one slot
        shifted[:, 1] = saved[:, 1]  # K only: order within a block does not matter
        for damage in (torch.zeros_like(saved), pool[table[index - 1]].clone(), shifted):
            pool[block] = damage
            assert abs(decode_logprob(pair, tokens, table) - healthy) > 1e-3
        pool[block] = saved
    assert decode_logprob(pair, tokens, table) == healthy


def test_the_other_sequences_blocks_do_not_matter(pair: Pair, rng: random.Random) -> None:
    tokens = pair.prompt(rng, 40)
    table = Blocks(rng).table(40)
    execute(pair.ours, [SequenceSlice(tokens[:-1], 0, table, None)])
    healthy = decode_logprob(pair, tokens, table)
    others = [block for block in range(NUM_BLOCKS) if block not in table]
    saved = pair.ours.kv.tensor.clone()
    pair.ours.kv.tensor[others] = math.nan
    pair.ours.kv.tensor[table[-1], :, :, :, len(tokens) % BLOCK_SIZE :] = math.nan  # stale slots
    assert decode_logprob(pair, tokens, table) == healthy
    pair.ours.kv.tensor.copy_(saved)


def test_a_decode_gives_the_same_alone_and_in_a_batch(pair: Pair, rng: random.Random) -> None:
    blocks, decodes = Blocks(rng), []
    for length in (3, 20, 61, 35):
        tokens, table = pair.prompt(rng, length + 1), blocks.table(length + 1)
        execute(pair.ours, [SequenceSlice(tokens[:-1], 0, table, None)])
        decodes.append(SequenceSlice(tokens[-1:], length, table, GREEDY))
    alone = [execute(pair.ours, [decode])[0] for decode in decodes]
    for members in ((0, 1), (1, 2, 3), (3, 0, 2, 1)):
        together = execute(pair.ours, [decodes[i] for i in members])
        assert_same_but_for_rounding(together, [alone[i] for i in members])


@pytest.mark.parametrize(("length", "size"), [(30, 16), (60, 7), (60, 60)])
def test_dynamic_rope_is_what_decoding_token_by_token_computes(
    tmp_path: Path, rng: random.Random, length: int, size: int
) -> None:
    """Dynamic RoPE equals decoding one by one, in any chunks and beyond the trained 40 tokens."""
    scaling = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    theirs = write_checkpoint(tmp_path, max_position_embeddings=40, rope_parameters=scaling)
    pair = Pair(theirs, make_runner(tmp_path, max_model_len=160))
    tokens, table = pair.prompt(rng, length), Blocks(rng).table(160)
    for piece in chunks(tokens, table, size):
        (sampled,) = execute(pair.ours, [piece])
    is_renamed = "cache" in inspect.signature(theirs.forward).parameters  # as of transformers 5.24
    cache = {"cache" if is_renamed else "past_key_values": DynamicCache()}
    unseen = tokens
    for _ in range(30):
        for token_id in unseen:
            with torch.inference_mode():
                out = theirs(torch.tensor([[token_id]]), use_cache=True, **cache)
        assert sampled is not None
        assert sampled.token_id == int(out.logits[0, -1].argmax())
        assert sampled.logprob == pytest.approx(
            float(out.logits[0, -1].log_softmax(-1).max()), abs=1e-4
        )
        unseen = [sampled.token_id]
        tokens = [*tokens, *unseen]
        piece = SequenceSlice(unseen, len(tokens) - 1, table, GREEDY)
        (sampled,) = execute(pair.ours, [piece])
