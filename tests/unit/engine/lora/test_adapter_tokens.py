"""Tokens with LoRA adapters equal those of a checkpoint with the adapter merged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import VARIANTS, write_checkpoint
from engines.generation import outputs_of
from engines.integrity import check_integrity
from fakes.adapters import ATTENTION, merge, write_adapter

from baton.core.engine_config import EngineConfig
from baton.core.errors import InvalidRequest
from baton.core.request.request import Adapter, Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution import runner
from baton.engine.execution.step_sizes import decode_graph_rows
from baton.engine.local import LocalEngine
from baton.engine.lora.rank_adapters import RankAdapters

NUM_TOKENS = 12
PROMPTS = [[5 + 7 * i % 300 for i in range(n)] for n in (37, 20, 3)]


@dataclass(frozen=True)
class World:
    """A small model, adapters for it, and the tokens of each merged model."""

    base: Path
    paths: dict[str, Path]
    expected: dict[str, list[list[int]]]


def config(model: Path, **changes: object) -> EngineConfig:
    fields = {"model": str(model), "device": "cpu", "cpu_kv_bytes": 4 << 20, "block_size": 4}
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]


def served(model: Path, **changes: object) -> LocalEngine:
    return LocalEngine.load(config(model, **changes), lambda line: None)


def lora(base: Path, **changes: object) -> LocalEngine:
    return served(base, **({"enable_lora": True, "max_loras": 3, "max_lora_rank": 8} | changes))


def request(
    prompt: list[int], number: int, adapter: Adapter | None = None, num_tokens: int = NUM_TOKENS
) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return Request(f"{number:032x}", 0, prompt, sampling, adapter=adapter)


def tokens(engine: LocalEngine, prompts: list[list[int]]) -> list[list[int]]:
    requests = [request(prompt, index) for index, prompt in enumerate(prompts)]
    outputs = outputs_of(engine, requests)
    return [outputs[one.key] for one in requests]


def make_world(folder: Path, variant: str, targets: dict[str, dict[str, object]]) -> World:
    base = folder / "base"
    write_checkpoint(base, **VARIANTS[variant])
    paths = {
        name: write_adapter(folder / name, base, seed=seed, **fields)  # type: ignore[arg-type]
        for seed, (name, fields) in enumerate(targets.items(), start=1)
    }
    models = {"": base}
    models |= {name: merge(folder / f"{name}-merged", base, path) for name, path in paths.items()}
    expected = {}
    for name, path in models.items():
        engine = served(path)
        expected[name] = tokens(engine, PROMPTS)
        engine.close()
    return World(base, paths, expected)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(
        tmp_path_factory.mktemp("lora"),
        "llama, gqa 4:2",
        {
            "one": {},
            "two": {"rank": 8, "use_rslora": True},
            "three": {"targets": ("q_proj", "down_proj"), "rank": 1},
        },
    )


@pytest.fixture
def engine(world: World) -> Iterator[LocalEngine]:
    engine = lora(world.base)
    yield engine
    engine.close()


def mixed(world: World, engine: LocalEngine) -> dict[str, list[list[int]]]:
    """Tokens of all prompts with each adapter and without one, computed in one run."""
    adapters = {
        name: engine.load_adapter(name, str(path)) if name else None
        for name, path in {"": None, **world.paths}.items()
    }
    requests = {
        (name, index): request(prompt, 100 * order + index, adapter)
        for order, (name, adapter) in enumerate(adapters.items())
        for index, prompt in enumerate(PROMPTS)
    }
    outputs = outputs_of(engine, [*requests.values()])
    return {
        name: [outputs[requests[name, index].key] for index in range(len(PROMPTS))]
        for name in adapters
    }


def test_each_request_of_a_mixed_batch_has_the_tokens_of_its_merged_model(
    world: World, engine: LocalEngine
) -> None:
    assert len({str(one) for one in world.expected.values()}) == 4, "adapters that change nothing"
    assert mixed(world, engine) == world.expected
    check_integrity(engine.engine)


def test_blocks_of_one_adapter_are_never_hit_by_another(world: World, engine: LocalEngine) -> None:
    one = engine.load_adapter("one", str(world.paths["one"]))
    two = engine.load_adapter("two", str(world.paths["two"]))
    for number, adapter in enumerate([None, one, two, None, one, two]):
        before = engine.engine.stats.totals().prefix_hit_tokens
        requested = request(PROMPTS[0], number, adapter)
        name = "" if adapter is None else adapter.name
        assert outputs_of(engine, [requested])[requested.key] == world.expected[name][0]
        hit = engine.engine.stats.totals().prefix_hit_tokens - before
        assert (hit > 0) == (number >= 3), "its own blocks alone"


@pytest.mark.parametrize(
    "method",
    [
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
        {"method": "draft_model"},
    ],
)
def test_drafts_are_verified_with_the_adapter(world: World, method: dict[str, object]) -> None:
    drafted = method | {"num_speculative_tokens": 3}
    if method["method"] == "draft_model":
        drafted["model"] = str(world.base)
    engine = lora(world.base, speculative_config=json.dumps(drafted))
    assert mixed(world, engine) == world.expected
    assert engine.engine.stats.totals().speculation.num_draft_tokens > 0
    assert mixed(world, engine) == world.expected, "from blocks that verified drafts have filled"
    engine.close()


def test_adapters_have_room_for_the_rows_of_every_graph(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = []

    def note(*arguments: object) -> RankAdapters:
        rooms.append(arguments[-1])
        return RankAdapters(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "RankAdapters", note)
    ngram = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 256}
    lora(world.base, speculative_config=ngram, **sizes).close()
    assert rooms == [decode_graph_rows(128, 4)], "of few tokens of prompts and many drafts"


def test_one_slot_serves_all_adapters_in_turn_and_evicted_ones_come_back(world: World) -> None:
    engine = lora(world.base, max_loras=1, max_cpu_loras=3)
    assert mixed(world, engine) == world.expected
    assert mixed(world, engine) == world.expected
    engine.close()


def test_preempted_requests_keep_their_adapter(world: World) -> None:
    engine = lora(world.base, num_kv_blocks=24, max_model_len=80, enable_prefix_caching=False)
    outputs_of(
        engine, [request(PROMPTS[2], n, num_tokens=1) for n in range(64)]
    )  # so that outputs are expected to be short
    assert mixed(world, engine) == world.expected
    assert engine.engine.stats.totals().num_preemptions > 0
    engine.close()


def test_further_samples_have_the_adapter_too(world: World, engine: LocalEngine) -> None:
    one = engine.load_adapter("one", str(world.paths["one"]))
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requested = Request(
        "a" * 32, 0, PROMPTS[1], sampling, adapter=one, fork_ids=("b" * 32, "c" * 32)
    )
    outputs = outputs_of(engine, [requested])
    assert [*outputs.values()] == [world.expected["one"][1]] * 3


def test_attention_of_a_mixture_of_experts(tmp_path: Path) -> None:
    found = make_world(
        tmp_path, "qwen3-moe, a dense layer", {"one": {"targets": ATTENTION}, "two": {}}
    )
    engine = lora(found.base)
    assert mixed(found, engine) == found.expected
    engine.close()


def test_without_the_flag_adapters_are_refused(world: World) -> None:
    engine = served(world.base)
    with pytest.raises(InvalidRequest, match="--enable-lora"):
        engine.load_adapter("one", str(world.paths["one"]))
    with pytest.raises(InvalidRequest, match="--enable-lora"):
        outputs_of(engine, [request(PROMPTS[0], 1, Adapter("one", "0" * 32, "/x"))])
    engine.close()
