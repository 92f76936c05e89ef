"""The runner against transformers in float32: logits, greedy tokens, every chunking, any blocks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from transformers import LlamaForCausalLM

from baton.core.config import EngineConfig
from baton.core.request import SamplingParams
from baton.engine.batch import SampledToken, SampleSpec, SequenceSlice
from baton.engine.cpu_steps import CpuSteps
from baton.engine.runner import ModelRunner

BLOCK_SIZE, NUM_BLOCKS = 16, 80
GREEDY = SampleSpec(SamplingParams(temperature=0.0), key=0)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa 4:2": {},
    "gqa 4:1, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "mha 4:4, derived head_dim": {
        "num_key_value_heads": 4,
        "hidden_size": 128,
        "head_dim": None,
        "num_hidden_layers": 3,
    },
    "biases, sharded": {"attention_bias": True, "mlp_bias": True, "max_shard_size": "200KB"},
    "llama3 rope": {"rope_parameters": LLAMA3},
}


@dataclass
class Pair:
    """One checkpoint in both implementations."""

    theirs: LlamaForCausalLM
    ours: ModelRunner

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Theirs, [tokens, vocab]."""
        with torch.inference_mode():
            return self.theirs(torch.tensor([token_ids])).logits[0]

    def check(self, sampled: SampledToken | None, token_ids: list[int]) -> None:
        """`sampled` greedily follows `token_ids`."""
        last = self.logits(token_ids)[-1]
        assert sampled is not None
        assert sampled.token_id == int(last.argmax())
        assert sampled.logprob == pytest.approx(float(last.log_softmax(-1).max()), abs=1e-4)


def make_runner(folder: Path, **changes: Any) -> ModelRunner:
    settings = {"device": "cpu", "block_size": BLOCK_SIZE, "num_kv_blocks": NUM_BLOCKS} | changes
    return ModelRunner(EngineConfig(model=str(folder), **settings))


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs = write_checkpoint(folder, seed=1, **VARIANTS[request.param])
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    theirs.save_pretrained(
        folder, max_shard_size=VARIANTS[request.param].get("max_shard_size", "5GB")
    )
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


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(320) for _ in range(length)]


def test_logits_equal_transformers(pair: Pair, rng: random.Random) -> None:
    token_ids = prompt(rng, 150)
    piece = SequenceSlice(token_ids, 0, Blocks(rng).table(150), None)
    steps = pair.ours._steps
    assert isinstance(steps, CpuSteps)
    steps = pair.ours._steps
    assert isinstance(steps, CpuSteps)
    with torch.inference_mode():
        ours = steps.model.logits(steps._forward([piece]))
    theirs = pair.logits(token_ids)
    scale = float(theirs.abs().max())
    assert scale > 1  # the checkpoint says something
    assert float((ours - theirs).abs().max()) <= 1e-4 * max(1.0, scale / 10)


@pytest.mark.parametrize("size", [1, 7, 16, 24, 64, 1000])
def test_chunked_prefill_then_greedy_decode(pair: Pair, rng: random.Random, size: int) -> None:
    token_ids = prompt(rng, 53)
    table = Blocks(rng).table(80)
    for piece in chunks(token_ids, table, size):
        (sampled,) = pair.ours.execute([piece])
        assert (sampled is None) == (piece.sample is None)
    for _ in range(12):
        pair.check(sampled, token_ids)
        assert sampled is not None
        token_ids = [*token_ids, sampled.token_id]
        piece = SequenceSlice(token_ids[-1:], len(token_ids) - 1, table, GREEDY)
        (sampled,) = pair.ours.execute([piece])


def test_mixed_batches_of_decodes_and_chunks(pair: Pair, rng: random.Random) -> None:
    blocks = Blocks(rng)
    sequences = [(prompt(rng, n), blocks.table(n + 8)) for n in (5, 33, 64, 17, 90)]
    waiting = [list(chunks(ids, table, 19)) for ids, table in sequences]
    tokens = [list(ids) for ids, _ in sequences]
    num_decoded = [0] * len(sequences)
    while min(num_decoded) < 6:
        running = [i for i in range(len(sequences)) if num_decoded[i] < 6]
        members = rng.sample(running, rng.randint(1, len(running)))
        batch = [
            waiting[i].pop(0)
            if waiting[i]
            else SequenceSlice(tokens[i][-1:], len(tokens[i]) - 1, sequences[i][1], GREEDY)
            for i in members
        ]
        results = pair.ours.execute(batch)
        for i, piece, sampled in zip(members, batch, results, strict=True):
            if piece.sample is None:
                assert sampled is None
                continue
            pair.check(sampled, tokens[i])
            assert sampled is not None
            tokens[i].append(sampled.token_id)
            num_decoded[i] += 1


def decode_logprob(pair: Pair, tokens: list[int], table: list[int]) -> float:
    """The log-probability that one decode step over the pool as it is reports."""
    piece = SequenceSlice(tokens[-1:], len(tokens) - 1, table, GREEDY)
    (sampled,) = pair.ours.execute([piece])
    assert sampled is not None
    return sampled.logprob


def test_every_block_matters(pair: Pair, rng: random.Random) -> None:
    """The power of the tests above: a zeroed, swapped or shifted block shows."""
    tokens = prompt(rng, 70)
    table = Blocks(rng).table(70)
    pair.ours.execute([SequenceSlice(tokens[:-1], 0, table, None)])
    healthy = decode_logprob(pair, tokens, table)
    pool = pair.ours.kv.tensor
    for index, block in enumerate(table):
        saved = pool[block].clone()
        shifted = saved.flatten().roll(saved.shape[-1]).view(saved.shape)  # by one slot
        shifted[:, 1] = saved[:, 1]  # of K alone: order within a block does not matter
        for damage in (torch.zeros_like(saved), pool[table[index - 1]].clone(), shifted):
            pool[block] = damage
            assert abs(decode_logprob(pair, tokens, table) - healthy) > 1e-3
        pool[block] = saved
    assert decode_logprob(pair, tokens, table) == healthy


def test_the_other_sequences_blocks_do_not_matter(pair: Pair, rng: random.Random) -> None:
    tokens = prompt(rng, 40)
    table = Blocks(rng).table(40)
    pair.ours.execute([SequenceSlice(tokens[:-1], 0, table, None)])
    healthy = decode_logprob(pair, tokens, table)
    others = [block for block in range(NUM_BLOCKS) if block not in table]
    saved = pair.ours.kv.tensor.clone()
    pair.ours.kv.tensor[others] = math.nan
    pair.ours.kv.tensor[table[-1], :, :, :, len(tokens) % BLOCK_SIZE :] = math.nan  # stale slots
    assert decode_logprob(pair, tokens, table) == healthy
    pair.ours.kv.tensor.copy_(saved)
