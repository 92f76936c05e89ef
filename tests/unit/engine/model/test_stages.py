"""The layers of each stage of a pipeline, and that a stage holds nothing of other stages."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint

from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.decode_node import engine_main as decode
from baton.engine.model.construction.decoder import make_decoder
from baton.engine.model.model_config import ModelConfig, read_model_config
from baton.engine.model.stages import layer_ranges
from baton.engine.model.weights.placement import Placement
from baton.prefill_node import engine_main as prefill

LAYER = 2 * 8 * 4 * (2 + 1) + 3 * 8 * 16  # weights of one layer, by the sizes below


def config_of(folder: Path, **changes: object) -> ModelConfig:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "head_dim": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": 10,
        "num_hidden_layers": 6,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(fields | changes))
    return read_model_config(folder)


def sizes(config: ModelConfig, num_stages: int) -> list[int]:
    ranges = layer_ranges(config, num_stages)
    ends = [each.end for each in ranges]
    assert [each.first for each in ranges] == [0, *ends[:-1]] and ends[-1] == config.num_layers
    assert [each.is_first for each in ranges] == [True, *[False] * (num_stages - 1)]
    assert [each.is_last for each in ranges] == [*[False] * (num_stages - 1), True]
    return [len(each) for each in ranges]


@pytest.mark.parametrize(
    ("num_layers", "vocab_size", "expected"),
    [
        (6, 10, [2, 2, 2]),
        (7, 10, [2, 3, 2]),  # the middle stage has no embedding or head
        (8, 10, [3, 3, 2]),
        # An LM head as large as two layers.
        (7, 2 * LAYER // 8, [3, 3, 1]),
        (4, 9 * LAYER // 8, [1, 2, 1]),  # the last stage costs at least the head
    ],
)
def test_the_head_counts(
    tmp_path: Path, num_layers: int, vocab_size: int, expected: list[int]
) -> None:
    config = config_of(tmp_path, num_hidden_layers=num_layers, vocab_size=vocab_size)
    assert sizes(config, 3) == expected


def test_prompts_alone_do_not_count_the_head(tmp_path: Path) -> None:
    config = config_of(tmp_path, num_hidden_layers=8, vocab_size=2 * LAYER // 8)
    assert [len(each) for each in layer_ranges(config, 2)] == [5, 3]
    assert [len(each) for each in layer_ranges(config, 2, decodes=False)] == [4, 4]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "prefill"),
        ({"tbt_target_ms": 25.0}, None),  # it decodes too
        ({"pp_balance": "decode"}, "decode"),
        ({"max_num_batched_tokens": 4096}, "prefill"),
    ],
)
def test_a_prefill_node_is_balanced_for_prompts(
    flags: dict[str, Any], expected: str | None
) -> None:
    assert prefill.adjust(EngineConfig(**flags)).pp_balance == expected
    assert decode.adjust(EngineConfig(**flags)).pp_balance == flags.get("pp_balance")


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_layers", [4, 5, 7])
def test_no_division_is_better(tmp_path: Path, num_layers: int, num_stages: int) -> None:
    """No division has a faster slowest stage or, at equal speed, a smaller largest stage."""
    config = config_of(tmp_path, num_hidden_layers=num_layers, vocab_size=70)

    def cost(counts: tuple[int, ...]) -> tuple[int, int]:
        read = [n * LAYER for n in counts]
        read[-1] += 70 * 8
        held = [*read]
        held[0] += 70 * 8
        return max(read), max(held)

    every = itertools.product(range(1, num_layers + 1), repeat=num_stages)
    best = min(cost(counts) for counts in every if sum(counts) == num_layers)
    assert cost(tuple(sizes(config, num_stages))) == best


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match="size 7: the model has 6 layers") as caught:
        layer_ranges(config_of(tmp_path), 7)
    assert caught.value.hint == "--pipeline-parallel-size 6"


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stage_holds_its_own_weights_alone(tmp_path: Path, is_tied: bool) -> None:
    write_checkpoint(tmp_path, num_hidden_layers=5, tie_word_embeddings=is_tied)
    config = read_model_config(tmp_path)
    placement = Placement(torch.device("cpu"), torch.float32)
    whole = make_decoder(config, placement).targets
    ends = ["model.norm.weight", "model.embed_tokens.weight" if is_tied else "lm_head.weight"]
    held: list[str] = []
    for layers in layer_ranges(config, 3):
        targets = make_decoder(config, placement, None, layers).targets
        prefixes = tuple(f"model.layers.{n}." for n in range(layers.first, layers.end))
        expected = {name for name in whole if name.startswith(prefixes)}
        if layers.is_first:
            expected.add("model.embed_tokens.weight")
        if layers.is_last:
            expected |= set(ends)
        assert set(targets) == expected
        held += expected
    assert set(held) == set(whole)
    assert len(held) == len(whole) + is_tied
