"""A model on several ranks computes the same as on one: here the ranks are threads."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoints import VARIANTS, write_checkpoint
from engines.steps import execute
from fakes.communicator import ThreadGroup

from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SampledToken, SequenceSlice, StepBatch
from baton.engine.execution.cpu_steps import CpuSteps
from baton.engine.execution.runner import ModelRunner
from baton.engine.model.model_config import read_model_config
from baton.engine.model.sharding import Heads, check_divisible, heads_of_rank
from baton.kernels.sampling.sample_spec import SampleSpec

EIGHT_HEADS = {"num_attention_heads": 8, "head_dim": 16}
MORE_VARIANTS = {
    "eight ranks, a KV head each": EIGHT_HEADS | {"num_key_value_heads": 8},
    "eight ranks, two KV heads": EIGHT_HEADS | {"num_key_value_heads": 2},
    "eight ranks, vocabulary of 9": EIGHT_HEADS | {"vocab_size": 9},
}
CASES = [
    *((name, variant, 2) for name, variant in VARIANTS.items()),
    *((name, VARIANTS[name], 4) for name in ("llama, gqa 4:1, tied", "llama, biases, sharded")),
    *((name, VARIANTS[name], 4) for name in ("qwen3", "qwen3-moe, a dense layer")),
    *((name, variant, 8) for name, variant in MORE_VARIANTS.items()),
]
EXPERT_PARALLEL = [
    "qwen3-moe, a dense layer",
    "qwen3-moe, merged",
    "qwen2-moe",
]
GREEDY = SampleSpec(SamplingParams(temperature=0.0), key=0)
DRAWN = SampleSpec(SamplingParams(temperature=0.9, top_k=40), key=123)


class Ranks:
    """The runners of one engine, each in its own thread."""

    def __init__(self, config: EngineConfig, size: int) -> None:
        self._threads = ThreadPoolExecutor(size)
        config = dataclasses.replace(config, tensor_parallel_size=size)
        self.runners = list(
            self._threads.map(
                lambda communicator: ModelRunner(config, None, communicator),
                ThreadGroup(size).ranks(),
            )
        )

    def execute(self, batch: list[SequenceSlice]) -> list[list[SampledToken | None]]:
        """The sampled tokens of each rank."""
        return list(self._threads.map(lambda runner: execute(runner, batch), self.runners))

    def logits(self, piece: SequenceSlice) -> list[torch.Tensor]:
        """The logits of each rank, [tokens, vocab]."""

        def compute(runner: ModelRunner) -> torch.Tensor:
            steps = runner._steps
            assert isinstance(steps, CpuSteps)
            with torch.inference_mode():
                return steps.model.lm_head.project(steps._forward(StepBatch.of([piece])))

        return list(self._threads.map(compute, self.runners))

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
        self._threads.shutdown()


@dataclasses.dataclass
class Pair:
    """The same model on one rank and on several."""

    alone: Ranks
    shared: Ranks


CASES += [(name, VARIANTS[name], 2) for name in EXPERT_PARALLEL]
NUM_PLAIN = len(CASES) - len(EXPERT_PARALLEL)


def name_of(index: int) -> str:
    name, _, size = CASES[index]
    return f"{name}: {size}{', experts whole' if index >= NUM_PLAIN else ''}"


# RoPE is applied per head, and the quick cases cover all that ranks share.
SLOW = {
    *("llama, linear rope: 2", "llama, llama3 rope: 2", "mistral, no window: 2"),
    *("qwen3-moe, every second layer: 2", "qwen3: 4", "llama, biases, sharded: 4"),
}
PARAMS = [
    pytest.param(index, marks=pytest.mark.slow if name_of(index) in SLOW else ())
    for index in range(len(CASES))
]


@pytest.fixture(scope="module", params=PARAMS, ids=name_of)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    _, variant, size = CASES[request.param]
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, seed=1, has_varied_vectors=True, **variant)
    config = EngineConfig(model=str(folder), device="cpu", num_kv_blocks=40)
    shared = dataclasses.replace(config, enable_expert_parallel=request.param >= NUM_PLAIN)
    pair = Pair(Ranks(config, 1), Ranks(shared, size))
    yield pair
    pair.alone.close()
    pair.shared.close()


def test_logits_are_close_to_those_of_one_rank_and_the_same_on_all(pair: Pair) -> None:
    rng = random.Random(3)
    vocab_size = pair.alone.runners[0].model_config.vocab_size
    piece = SequenceSlice(
        [rng.randrange(vocab_size) for _ in range(90)], 0, [9, 3, 30, 7, 8, 2], None
    )
    (expected,), found = pair.alone.logits(piece), pair.shared.logits(piece)
    scale = max(1.0, float(expected.abs().max()))
    assert float((found[0] - expected).abs().max()) <= 2e-5 * scale
    assert all(torch.equal(found[0], logits) for logits in found)


def test_chunks_and_decodes_give_the_same_tokens_on_all_ranks(pair: Pair) -> None:
    rng = random.Random(4)
    vocab_size = pair.alone.runners[0].model_config.vocab_size
    tokens = [[rng.randrange(vocab_size) for _ in range(n)] for n in (40, 23)]
    tables, specs = [[5, 9, 2, 11], [8, 3, 20, 21]], [GREEDY, DRAWN]
    starts = [0, 0]
    for size in (17, 100, 1, 1, 1):
        batch = [
            SequenceSlice(ids[start : start + size], start, table, spec if size != 17 else None)
            for ids, start, table, spec in zip(tokens, starts, tables, specs, strict=True)
        ]
        (expected,), found = pair.alone.execute(batch), pair.shared.execute(batch)
        assert all(results == found[0] for results in found)
        for index, (one, other) in enumerate(zip(expected, found[0], strict=True)):
            starts[index] += len(batch[index].token_ids)
            if one is not None and other is not None:
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                tokens[index].append(one.token_id)
    assert [len(ids) for ids in tokens] == [44, 27]


def test_a_decode_gives_the_same_bits_alone_and_in_a_batch(pair: Pair) -> None:
    """Sums over the ranks are in rank order, whatever the size of the step."""
    decodes = []
    for index, length in enumerate((3, 20, 14)):
        ids, table = list(range(length + 1)), [2 + 2 * index, 3 + 2 * index]
        ids = [i % 9 for i in ids]
        pair.shared.execute([SequenceSlice(ids[:-1], 0, table, None)])
        decodes.append(SequenceSlice(ids[-1:], length, table, GREEDY))
    together = pair.shared.execute(decodes)[0]
    assert [pair.shared.execute([decode])[0][0] for decode in decodes] == together


def test_pools_hold_the_heads_of_their_rank(pair: Pair) -> None:
    """Put together by their head ranges, the ranks' pools are the pool of one rank."""
    piece = SequenceSlice(list(range(9)), 0, [6], None)
    pair.alone.execute([piece])
    pair.shared.execute([piece])
    whole = pair.alone.runners[0].kv.tensor[6, :, :, :, :9]  # [layers, 2, kv_heads, tokens, dim]
    seen = set()
    for runner in pair.shared.runners:
        heads = range(
            runner.heads.first_kv_head, runner.heads.first_kv_head + runner.heads.num_kv_heads
        )
        part = runner.kv.tensor[6, :, :, :, :9]
        torch.testing.assert_close(part, whole[:, :, list(heads)], atol=1e-4, rtol=1e-4)
        seen |= set(heads)
    assert seen == set(range(whole.shape[2]))


def test_ranks_agree_on_the_fingerprint_of_one_rank(pair: Pair) -> None:
    (alone,) = pair.alone.runners
    assert all(runner.fingerprint == alone.fingerprint for runner in pair.shared.runners)


def test_heads_of_a_rank(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    config = read_model_config(tmp_path)
    assert [heads_of_rank(config, rank, 2) for rank in (0, 1)] == [
        Heads(0, 4, 0, 1),
        Heads(4, 4, 1, 1),
    ]
    assert [heads_of_rank(config, rank, 4).first_kv_head for rank in range(4)] == [0, 0, 1, 1]
    assert heads_of_rank(config, 7, 8) == Heads(7, 1, 1, 1)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "--tensor-parallel-size 3 does not divide .* num_attention_heads of 4"),
        ({"intermediate_size": 162}, 4, "4 does not divide .* intermediate_size of 162"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            "4 neither divides the model's 6 KV heads nor is a multiple of them",
        ),
        (
            {
                "architecture": "Qwen3MoeForCausalLM",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 34,
            },
            4,
            "4 does not divide .* moe_intermediate_size of 34",
        ),
    ],
)
def test_what_does_not_divide_is_named(
    tmp_path: Path, changes: dict[str, object], size: int, message: str
) -> None:
    write_checkpoint(tmp_path, **changes)
    with pytest.raises(StartupFailed, match=message):
        check_divisible(read_model_config(tmp_path), size)


def test_experts_whole_need_experts_that_divide(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **VARIANTS["mixtral, moe"])
    with pytest.raises(StartupFailed, match=r"4 does not divide .* num_experts of 5"):
        check_divisible(read_model_config(tmp_path), 4, has_expert_parallel=True)
    write_checkpoint(tmp_path)
    with pytest.raises(StartupFailed, match="LlamaForCausalLM has no experts"):
        check_divisible(read_model_config(tmp_path), 1, has_expert_parallel=True)


def test_all_ranks_count_the_same_choices(tmp_path: Path) -> None:
    """All ranks count the same expert choices, without those of padding rows."""
    write_checkpoint(tmp_path, **VARIANTS["qwen3-moe, a dense layer"])
    config = EngineConfig(
        model=str(tmp_path), device="cpu", num_kv_blocks=40, enable_expert_parallel=True
    )
    ranks = Ranks(config, 2)
    ranks.execute([SequenceSlice([5, 6, 7], 0, [4], GREEDY)])
    ranks.execute([SequenceSlice([9], 3, [4], GREEDY)])  # beside a row of padding
    first, second = (runner.expert_tokens() for runner in ranks.runners)
    assert first == second and sum(first) == 4 * 2 * 2  # tokens, experts a token, layers
    ranks.close()


def test_the_numbers_of_ranks_that_would_do_are_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_attention_heads=8, num_key_value_heads=2, intermediate_size=48)
    with pytest.raises(StartupFailed) as caught:
        check_divisible(read_model_config(tmp_path), 6)
    assert caught.value.hint == "--tp 1 or 2 or 4"
