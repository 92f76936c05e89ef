"""Guarantees of a step besides right results: independence, untouched blocks, typed errors."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from engines.steps import execute
from rounding import assert_same_but_for_rounding

from baton.core.engine_config import EngineConfig
from baton.core.errors import EngineFailed, StartupFailed
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SampledToken, SequenceSlice
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.kv_memory import canary_bytes
from baton.engine.kv.memfd import map_read_only
from baton.engine.model.fingerprint import short
from baton.kernels.sampling.sample_spec import SampleSpec

BLOCK_SIZE, NUM_BLOCKS = 16, 64
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device="cpu", block_size=BLOCK_SIZE, num_kv_blocks=NUM_BLOCKS
    )


@pytest.fixture(scope="module")
def runner(config: EngineConfig) -> ModelRunner:
    return ModelRunner(config)


@pytest.mark.parametrize(("chosen", "expected"), [(None, 16), (7, 7), (1000, 1000)])
def test_as_many_run_as_the_pool_is_good_for_unless_the_operator_says(
    config: EngineConfig, chosen: int | None, expected: int
) -> None:
    runner = ModelRunner(dataclasses.replace(config, max_num_seqs=chosen))
    assert runner.max_num_seqs == expected
    runner.close()


def prefill_all(runner: ModelRunner, rng: random.Random) -> list[SequenceSlice]:
    """Prefill sequences of several lengths and return the next decode of each."""
    ids = rng.sample(range(2, NUM_BLOCKS), NUM_BLOCKS - 2)
    decodes = []
    for length in (3, 16, 20, 61, 100, 35, 17, 80):
        tokens = [rng.randrange(320) for _ in range(length + 1)]
        table = [ids.pop() for _ in range(length // BLOCK_SIZE + 1)]
        execute(runner, [SequenceSlice(tokens[:-1], 0, table, None)])
        spec = SampleSpec(rng.choice([GREEDY, DRAWN]), rng.getrandbits(64))
        decodes.append(SequenceSlice(tokens[-1:], length, table, spec))
    return decodes


def test_a_decode_gives_the_same_alone_and_in_any_batch(runner: ModelRunner) -> None:
    rng = random.Random(3)
    decodes = prefill_all(runner, rng)
    alone = [execute(runner, [decode])[0] for decode in decodes]
    for _ in range(10):
        chosen = rng.sample(range(len(decodes)), rng.randint(2, len(decodes)))
        together = execute(runner, [decodes[i] for i in chosen])
        assert_same_but_for_rounding(together, [alone[i] for i in chosen])


def test_the_key_decides_what_is_drawn(runner: ModelRunner) -> None:
    tokens, table = list(range(10)), [2]

    def draw(key: int) -> SampledToken | None:
        return execute(runner, [SequenceSlice(tokens, 0, table, SampleSpec(DRAWN, key))])[0]

    assert draw(1) == draw(1)
    assert len({draw(key) for key in range(20)}) > 3


def test_a_step_writes_its_own_slots_only(runner: ModelRunner) -> None:
    table = [9, 4, 30]
    runner.kv.tensor.fill_(3.0)
    execute(runner, [SequenceSlice(list(range(5)), 20, table, None)])
    changed = (runner.kv.tensor != 3.0).any(dim=5).any(dim=3).all(dim=1).all(dim=1)
    assert changed.nonzero().tolist() == [[4, offset] for offset in range(4, 9)]


def test_what_torch_raises_ends_the_engine(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(runner._steps, "model", type("Broken", (), {"forward": out_of_memory})())
    with pytest.raises(EngineFailed, match="not enough memory"):
        execute(runner, [SequenceSlice([1, 2], 0, [5], None)])


def test_copy_blocks(runner: ModelRunner) -> None:
    runner.kv.tensor[7] = 1.0
    runner.kv.tensor[8] = 2.0
    runner.copy_blocks([(7, 11), (8, 7)])
    assert runner.kv.tensor[11].eq(1.0).all() and runner.kv.tensor[7].eq(2.0).all()
    runner.copy_blocks([])


def test_a_peer_finds_the_canary_in_block_1(runner: ModelRunner) -> None:
    runner.write_canary("ef" * 16)
    size = runner.kv.block_bytes
    window = map_read_only(runner.kv.fd, NUM_BLOCKS * size)
    assert window[size : 2 * size] == canary_bytes("ef" * 16, size)


def test_start_up_reports_facts_and_progress(config: EngineConfig) -> None:
    seen: list[tuple[int, int]] = []
    runner = ModelRunner(config, on_progress=lambda *progress: seen.append(progress))
    assert runner.max_model_len == 512
    assert runner.eos_token_ids == (2,)
    assert runner.kv.num_blocks == NUM_BLOCKS
    assert seen == sorted(seen) and len(seen) > 1
    assert seen[-1][0] == seen[-1][1] > 0


def fingerprint(config: EngineConfig, **changes: object) -> dict[str, str]:
    return ModelRunner(dataclasses.replace(config, **changes)).fingerprint  # type: ignore[arg-type]


def test_fingerprints_differ_in_the_field_that_differs(
    config: EngineConfig, tmp_path: Path
) -> None:
    base = fingerprint(config)
    assert fingerprint(config, num_kv_blocks=50) == base
    assert short(dict(reversed(base.items()))) == short(base)
    write_checkpoint(tmp_path, seed=5)
    dummy = {"load_format": "dummy"}
    cases = [
        (fingerprint(config, block_size=8, num_kv_blocks=100), {"block_size"}),
        (fingerprint(config, dtype="bfloat16"), {"dtype"}),
        (fingerprint(config, model=str(tmp_path)), {"model"}),
        (fingerprint(config, **dummy), {"model"}),
        (fingerprint(config, **dummy, seed=1), {"model"}),
    ]
    for fields, differing in cases:
        assert {name for name in base if fields[name] != base[name]} == differing
    assert len({short(fields) for fields, _ in cases} | {short(base)}) == 6


def test_dummy_weights_run_from_the_config_alone(
    config: EngineConfig, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    dummy = dataclasses.replace(config, model=str(tmp_path), load_format="dummy")
    piece = SequenceSlice([5, 6, 7], 0, [3], SampleSpec(GREEDY, 0))
    assert execute(ModelRunner(dummy), [piece]) == execute(ModelRunner(dummy), [piece])


def test_bf16_runs_and_stays_near_float32(config: EngineConfig, runner: ModelRunner) -> None:
    piece = SequenceSlice(list(range(40)), 0, [3, 9, 4], SampleSpec(GREEDY, 0))
    half = ModelRunner(dataclasses.replace(config, dtype="bfloat16"))
    assert half.kv.tensor.dtype == torch.bfloat16
    (ours,), (wanted,) = execute(half, [piece]), execute(runner, [piece])
    assert ours is not None and wanted is not None
    assert ours.logprob == pytest.approx(wanted.logprob, abs=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 513}, "512 tokens"),
        ({"max_model_len": 0}, "--max-model-len 0"),
        ({"num_kv_blocks": 10}, "the KV of 512 tokens"),
        ({"attention_backend": "flashinfer"}, "flashinfer"),
        ({"model": "/nowhere"}, "/nowhere"),
    ],
)
def test_impossible_settings_are_startup_errors(
    config: EngineConfig, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(StartupFailed, match=message):
        ModelRunner(dataclasses.replace(config, **changes))  # type: ignore[arg-type]
