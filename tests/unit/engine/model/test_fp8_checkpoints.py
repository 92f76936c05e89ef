"""FP8 checkpoints on a CPU: each format gives the result of an explicit dequantisation."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VARIANTS, write_checkpoint
from engines.generation import outputs_of
from fp8_checkpoints import FORMATS, FP8, write_fp8_checkpoint
from live_bytes import LiveBytes
from safetensors.torch import load_file, save_file

from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine
from baton.engine.model.communicator import Communicator
from baton.engine.model.construction.decoder import make_decoder
from baton.engine.model.construction.experts import is_merged_name
from baton.engine.model.decoder import Decoder
from baton.engine.model.model_config import read_model_config
from baton.engine.model.sharding import check_divisible
from baton.engine.model.weights.checkpoint import load_weights, tensor_names
from baton.engine.model.weights.dummy_weights import fill_dummy_weights
from baton.engine.model.weights.placement import Placement
from baton.engine.model.weights.weight_files import weights_bytes
from baton.kernels.products.weights import BlockScaled, RowScaled, quantise_rows

# Aligned to blocks, as released models are.
ALIGNED = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
NEAR_TIE = 1e-3


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    settings = {"device": "cpu", "num_kv_blocks": 60, "max_num_seqs": 8}
    return EngineConfig(model=str(folder), **(settings | changes))


def placement_of(folder: Path, quantization: str | None = None, **changes: Any) -> Placement:
    """A placement that keeps weights quantised, as in the file or by --quantization."""
    found = read_model_config(folder, quantization).quantization
    settings: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "quantization": found,
        "stays_quantised": True,
    }
    return Placement(**(settings | changes))


def loaded(folder: Path, placement: Placement) -> Decoder:
    is_merged = any(map(is_merged_name, tensor_names(folder)))
    placement = dataclasses.replace(placement, has_merged_experts=is_merged)
    model = make_decoder(read_model_config(folder), placement)
    quantised = [name.removesuffix(".weight") for name, t in model.targets.items() if t.quantised]
    assert placement.quantization is not None
    ignored = placement.quantization.ignored(quantised)
    load_weights(folder, model.targets, ignored=ignored)
    return model


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    """All projections as floats, by layer and name."""
    found = {}
    for index, layer in enumerate(model.layers):
        attention, mlp = layer.attention, layer.mlp
        for name, part in {
            "qkv": attention.qkv,
            "out": attention.out,
            "gate_up": mlp.gate_up,
            "down": mlp.down,
        }.items():
            weight = part.weight
            is_plain = isinstance(weight, torch.Tensor)
            found[f"{index}.{name}"] = weight if is_plain else weight.dequantised(torch.float32)
    return found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_greedy_tokens_are_those_of_the_dequantised_model(
    tmp_path: Path, name: str, is_sharded: bool
) -> None:
    # Sizes are deliberately no multiples of 128: a CPU takes any.
    theirs = write_fp8_checkpoint(tmp_path, name, is_sharded=is_sharded, seed=2)
    config = config_of(tmp_path)
    engine = LocalEngine(config, ModelRunner(config))
    rng = random.Random(1)
    prompt = tuple(rng.choices(range(3, 320), k=40))
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    request = Request(f"{1:032x}", 0, prompt, sampling)
    tokens = outputs_of(engine, [request])[request.key]
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*prompt, *tokens]])).logits[0]
    for token, row in zip(tokens, logits[len(prompt) - 1 : -1], strict=True):
        assert float(row.max() - row[token]) < NEAR_TIE
    engine.runner.close()


@pytest.mark.parametrize("name", FORMATS)
def test_weights_stay_as_they_are_in_the_file(tmp_path: Path, name: str) -> None:
    theirs = write_fp8_checkpoint(tmp_path, name, **ALIGNED)
    model = loaded(tmp_path, placement_of(tmp_path))
    weight = model.layers[0].attention.qkv.weight
    assert isinstance(weight, BlockScaled if "block" in name else RowScaled)
    assert weight.data.dtype == FP8 and weight.scale.dtype == torch.float32
    state = theirs.state_dict()
    for key, found in weights_of(model).items():
        index, part = key.split(".")
        names = {
            "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "out": ["self_attn.o_proj"],
            "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "down": ["mlp.down_proj"],
        }[part]
        expected = torch.cat([state[f"model.layers.{index}.{n}.weight"] for n in names])
        assert torch.equal(found, expected)
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])


@pytest.mark.parametrize("name", ["block", "compressed, channel", "tensor, static activations"])
@pytest.mark.parametrize("stays_quantised", [False, True])
def test_each_rank_has_its_part(tmp_path: Path, name: str, stays_quantised: bool) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    write_fp8_checkpoint(tmp_path, name, **sizes)
    whole = weights_of(loaded(tmp_path, placement_of(tmp_path)))
    parts = []
    for rank in range(2):
        communicator = Communicator()
        communicator.rank, communicator.size = rank, 2
        placement = placement_of(
            tmp_path, communicator=communicator, stays_quantised=stays_quantised
        )
        parts.append(weights_of(loaded(tmp_path, placement)))
    for key in ("0.out", "1.down"):
        assert torch.equal(torch.cat([part[key] for part in parts], dim=1), whole[key])
    for first in (0, 256):  # gate, up
        of_ranks = torch.cat([part["0.gate_up"][first : first + 256] for part in parts])
        assert torch.equal(of_ranks, whole["0.gate_up"][2 * first : 2 * first + 512])


def test_quantised_at_load_by_row_alike_on_all_ranks(tmp_path: Path) -> None:
    state = write_checkpoint(tmp_path, **ALIGNED).state_dict()
    model = loaded(tmp_path, placement_of(tmp_path, "fp8"))
    down = model.layers[1].mlp.down.weight
    assert isinstance(down, RowScaled)
    data, scale = quantise_rows(state["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(down.data.float(), data.float()) and torch.equal(down.scale, scale)
    assert isinstance(model.embed.weight, torch.Tensor)
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])
    communicator = Communicator()
    communicator.rank, communicator.size = 1, 2
    part = loaded(tmp_path, placement_of(tmp_path, "fp8", communicator=communicator))
    of_rank = part.layers[1].mlp.down.weight
    assert isinstance(of_rank, RowScaled)
    assert torch.equal(of_rank.scale, down.scale)
    assert torch.equal(of_rank.data.float(), down.data[:, 192:].float())
    floats = loaded(tmp_path, placement_of(tmp_path, "fp8", stays_quantised=False))
    assert torch.equal(weights_of(floats)["1.down"], down.dequantised(torch.float32))


def test_quantising_at_load_holds_the_result_and_a_layer(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3}
    model = write_checkpoint(tmp_path, **sizes).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    layer_bytes = 2 * sum(p.numel() for p in model.model.layers[0].parameters())
    del model
    with LiveBytes() as live:
        loaded_model = loaded(tmp_path, placement_of(tmp_path, "fp8", dtype=torch.bfloat16))
        num_bytes = sum(target.nbytes for target in loaded_model.targets.values())
    assert num_bytes < live.most < num_bytes + layer_bytes
    assert 3 * layer_bytes > 1.8 * (num_bytes - loaded_model.embed.weight.nbytes * 2)


@pytest.mark.parametrize("name", ["block", "compressed, channel"])
def test_dummy_weights_are_the_same_with_or_without_fp8(tmp_path: Path, name: str) -> None:
    write_fp8_checkpoint(tmp_path, name, **ALIGNED)
    found = []
    for stays_quantised in (False, True):
        model = make_decoder(
            read_model_config(tmp_path), placement_of(tmp_path, stays_quantised=stays_quantised)
        )
        fill_dummy_weights(model.targets, std=0.02, seed=3)
        found.append(weights_of(model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert found[0]["0.qkv"].std().item() == pytest.approx(0.02, rel=0.05)


def damage(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


Q = "model.layers.1.self_attn.q_proj"
BLOCK = f"{Q}.weight_scale_inv"
CHANNEL = f"{Q}.weight_scale"


def _holding(value: float, *shape: int) -> torch.Tensor:
    scale = torch.full(shape, 0.01)
    scale.view(-1)[1] = value
    return scale


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("block", {BLOCK: None}, f"lacks the tensor {BLOCK}"),
        ("block", {f"{Q}.weight": None}, rf"lacks the tensor {Q}\.weight"),
        ("block", {BLOCK: _holding(0.0, 2, 2)}, rf"{BLOCK} in .*safetensors .*above 0, such as 0"),
        ("block", {BLOCK: _holding(-1.0, 2, 2)}, "such as -1"),
        ("block", {BLOCK: _holding(float("nan"), 2, 2)}, "such as nan"),
        ("block", {BLOCK: _holding(float("inf"), 2, 2)}, "such as inf"),
        ("block", {BLOCK: torch.ones(2, 3)}, rf"shape \[2, 3\].*{Q}.*\[2, 2\]"),
        ("block", {BLOCK: torch.ones(2, 2, dtype=torch.int32)}, "type I32"),
        ("block", {f"{Q}.weight": torch.ones(256, 256)}, r"type F32.*F8_E4M3"),
        ("compressed, channel", {CHANNEL: torch.ones(255, 1)}, r"shape \[255, 1\].*\[256, 1\]"),
        ("compressed, channel", {CHANNEL: _holding(0.0, 256, 1)}, "1 scales"),
        ("compressed, tensor", {CHANNEL: torch.ones(2)}, r"shape \[2\]"),
        ("compressed, tensor", {CHANNEL: None}, "lacks"),
        ("block", {f"{Q}.k_scale": torch.ones(1)}, "k_scale, which its architecture"),
        ("block", {f"{Q}.input_scale": torch.ones(1)}, "input_scale, which its architecture"),
    ],
)
def test_what_is_wrong_is_named_before_memory_is_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: dict[str, torch.Tensor | None],
    message: str,
) -> None:
    write_fp8_checkpoint(tmp_path, name, **ALIGNED)
    damage(tmp_path, change)
    taken = []
    matrix = Placement.matrix

    def seen(placement: Placement, *sizes: int) -> torch.Tensor:
        if placement.device.type != "meta":
            taken.append(sizes)
        return matrix(placement, *sizes)

    monkeypatch.setattr(Placement, "matrix", seen)
    with pytest.raises(StartupFailed, match=message):
        ModelRunner(config_of(tmp_path))
    assert not taken


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "block", **ALIGNED)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StartupFailed, match=r"model\.safetensors"):
        ModelRunner(config_of(tmp_path))


BLOCKS = FORMATS["block"][0]
CHANNELS = FORMATS["compressed, channel"][0]
GROUP = CHANNELS["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"bits": 4}, "quant_method None"),
        (BLOCKS | {"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        (BLOCKS | {"weight_block_size": 128}, "weight_block_size 128"),
        (BLOCKS | {"fmt": "e5m2"}, "e5m2"),
        (BLOCKS | {"activation_scheme": "block"}, "activation_scheme 'block'"),
        (BLOCKS | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (CHANNELS | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        (CHANNELS | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (CHANNELS | {"config_groups": {"a": GROUP, "b": GROUP}}, "2 config_groups"),
        (CHANNELS | {"config_groups": {}}, "0 config_groups"),
        (CHANNELS | {"config_groups": {"a": GROUP | {"targets": ["re:.*"]}}}, "targets"),
        (
            CHANNELS | {"config_groups": {"a": GROUP | {"weights": {"num_bits": 4}}}},
            "floats of 8 bits",
        ),
        (
            CHANNELS
            | {
                "config_groups": {
                    "a": GROUP | {"weights": GROUP["weights"] | {"strategy": "group"}}
                }
            },
            "strategy 'group'",
        ),
        (CHANNELS | {"ignore": ["re:("]}, "no pattern"),
        (CHANNELS | {"ignore": ["model.layers.0.self_attn.q_proj"]}, "only some of"),
        ([1], "quantization_config"),
    ],
)
def test_unsupported_formats_are_named(tmp_path: Path, config: Any, message: str) -> None:
    write_checkpoint(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    with pytest.raises(StartupFailed, match=message):
        ModelRunner(config_of(tmp_path))


def test_engines_of_different_quantisation_have_different_fingerprints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    found = []
    for quantization in (None, "fp8"):
        runner = ModelRunner(config_of(tmp_path, quantization=quantization))
        found.append(runner.fingerprint)
        runner.close()
    assert found[0]["model"] != found[1]["model"]
    assert {k for k in found[0] if found[0][k] != found[1][k]} == {"model"}


def test_a_tensor_parallel_size_that_cuts_blocks_is_refused(tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "block", **ALIGNED)
    with pytest.raises(StartupFailed, match="blocks of 128") as caught:
        check_divisible(read_model_config(tmp_path), 2, stays_quantised=True)
    assert "--tp 1" in caught.value.hint


def test_ranks_cut_blocks_where_they_are_dequantised(tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "block", **ALIGNED)
    whole = loaded(tmp_path, placement_of(tmp_path, stays_quantised=False)).targets
    for rank in range(2):
        communicator = Communicator()
        communicator.rank, communicator.size = rank, 2
        config = config_of(tmp_path, tensor_parallel_size=2)
        runner = ModelRunner(config, None, communicator)
        parts = runner.model.targets
        assert parts.keys() == whole.keys()
        for name, part in parts.items():
            expected = whole[name].tensor
            if part.cut is not None:
                size = part.tensor.shape[part.cut.dim]
                expected = expected.narrow(part.cut.dim, part.cut.start, size)
            assert torch.equal(part.tensor, expected), name
        assert parts["model.layers.0.mlp.down_proj.weight"].tensor.shape[1] == 192
        runner.close()


def test_merged_parts_that_share_a_block_are_refused_where_fp8_stays(tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "block", **(ALIGNED | {"intermediate_size": 192}))
    with pytest.raises(StartupFailed, match=r"up_proj\.weight.*begins at 192"):
        loaded(tmp_path, placement_of(tmp_path))


@pytest.mark.parametrize("name", ["block", "compressed, channel"])
def test_the_bytes_of_weights_are_known_before_they_are_read(tmp_path: Path, name: str) -> None:
    write_fp8_checkpoint(tmp_path, name, **ALIGNED)
    placement = placement_of(tmp_path, dtype=torch.bfloat16)
    model = make_decoder(read_model_config(tmp_path), placement)
    num_bytes = sum(target.nbytes for target in model.targets.values())
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16")
    assert weights_bytes(config) == pytest.approx(num_bytes, rel=1e-2)
    dummy = dataclasses.replace(config, load_format="dummy")
    assert weights_bytes(dummy) == pytest.approx(num_bytes, rel=2e-2)
    floats = EngineConfig(model=str(tmp_path), dtype="float32")
    assert weights_bytes(floats) == pytest.approx(_floats_bytes(tmp_path), rel=2e-2)


def test_the_bytes_of_weights_that_are_quantised_at_load(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **ALIGNED)
    placement = placement_of(tmp_path, "fp8", dtype=torch.bfloat16)
    model = make_decoder(read_model_config(tmp_path, "fp8"), placement)
    num_bytes = sum(target.nbytes for target in model.targets.values())
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", quantization="fp8")
    assert weights_bytes(config) == pytest.approx(num_bytes, rel=2e-2)
    dummy = dataclasses.replace(config, load_format="dummy")
    assert weights_bytes(dummy) == pytest.approx(num_bytes, rel=2e-2)


def _floats_bytes(folder: Path) -> int:
    model = make_decoder(read_model_config(folder), placement_of(folder, stays_quantised=False))
    return sum(target.nbytes for target in model.targets.values())


MIXTURE = VARIANTS["qwen3-moe, a dense layer"] | {
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
}


def experts_of(model: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate_up, down) of the first layer, as floats: [experts, outputs, inputs]."""
    mixture = model.layers[0].mlp.mixture
    found = []
    for weights in (mixture.gate_up, mixture.down):
        each = [weights.of(expert) for expert in range(weights.num_experts)]
        plain = [w if isinstance(w, torch.Tensor) else w.dequantised(torch.float32) for w in each]
        found.append(torch.stack(plain))
    return found[0], found[1]


@pytest.mark.parametrize("name", ["block", "compressed, channel", "compressed, tensor"])
@pytest.mark.parametrize("stays_quantised", [False, True])
def test_experts_are_those_of_the_file(tmp_path: Path, name: str, stays_quantised: bool) -> None:
    theirs = write_fp8_checkpoint(tmp_path, name, **MIXTURE).state_dict()
    model = loaded(tmp_path, placement_of(tmp_path, stays_quantised=stays_quantised))
    mixture = model.layers[0].mlp.mixture
    assert isinstance(mixture.router, torch.Tensor)
    for weights in (mixture.gate_up, mixture.down):
        assert weights.values.dtype == (FP8 if stays_quantised else torch.float32)
        assert weights.scaling == (0 if not stays_quantised else 2 if name == "block" else 1)
    for part, found in zip(("gate_up", "down"), experts_of(model), strict=True):
        assert torch.equal(found, theirs[f"model.layers.0.mlp.experts.{part}_proj"])


@pytest.mark.parametrize("name", ["block", "compressed, channel"])
@pytest.mark.parametrize("stays_quantised", [False, True])
@pytest.mark.parametrize("is_whole", [True, False])
def test_ranks_share_experts(
    tmp_path: Path, name: str, stays_quantised: bool, is_whole: bool
) -> None:
    """Each rank holds whole experts, or a part of each expert."""
    write_fp8_checkpoint(tmp_path, name, **MIXTURE)
    config = read_model_config(tmp_path)
    check_divisible(config, 2, has_expert_parallel=is_whole, stays_quantised=stays_quantised)
    whole = experts_of(loaded(tmp_path, placement_of(tmp_path)))
    _check_parts(tmp_path, whole, None, is_whole=is_whole, stays_quantised=stays_quantised)


def _check_parts(
    folder: Path,
    whole: tuple[torch.Tensor, torch.Tensor],
    quantization: str | None,
    *,
    is_whole: bool,
    stays_quantised: bool,
) -> None:
    parts = []
    for rank in range(2):
        communicator = Communicator()
        communicator.rank, communicator.size = rank, 2
        changes = {"communicator": communicator, "has_expert_parallel": is_whole}
        placement = placement_of(folder, quantization, stays_quantised=stays_quantised, **changes)
        parts.append(experts_of(loaded(folder, placement)))
    gate_ups, downs = zip(*parts, strict=True)
    assert torch.equal(torch.cat(downs, dim=0 if is_whole else 2), whole[1])
    if not is_whole:  # the gates of all ranks, then their up projections
        gate_ups = [half for n in range(2) for half in (one.chunk(2, 1)[n] for one in gate_ups)]
    assert torch.equal(torch.cat(gate_ups, dim=0 if is_whole else 1), whole[0])


def test_blocks_of_experts_that_ranks_would_cut_are_refused(tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "block", **(MIXTURE | {"moe_intermediate_size": 128}))
    config = read_model_config(tmp_path)
    with pytest.raises(StartupFailed, match="blocks of 128: 64 of the moe_intermediate_size"):
        check_divisible(config, 2, stays_quantised=True)
    check_divisible(config, 2, stays_quantised=True, has_expert_parallel=True)
    check_divisible(config, 2)


@pytest.mark.parametrize("is_merged", [False, True])
def test_experts_are_quantised_at_load(tmp_path: Path, is_merged: bool) -> None:
    state = write_checkpoint(tmp_path, **MIXTURE, save_original_format=not is_merged).state_dict()
    found = loaded(tmp_path, placement_of(tmp_path, "fp8"))
    assert found.layers[0].mlp.mixture.down.scaling == 1
    whole = experts_of(found)
    for part, experts in zip(("gate_up", "down"), whole, strict=True):
        for expert, weight in zip(
            experts, state[f"model.layers.0.mlp.experts.{part}_proj"], strict=True
        ):
            data, scale = quantise_rows(weight)
            assert torch.equal(expert, data.float() * scale[:, None])


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("stays_quantised", [False, True])
@pytest.mark.parametrize("is_whole", [True, False])
def test_ranks_quantise_their_experts_alike(
    tmp_path: Path, is_merged: bool, stays_quantised: bool, is_whole: bool
) -> None:
    write_checkpoint(tmp_path, **MIXTURE, save_original_format=not is_merged)
    whole = experts_of(loaded(tmp_path, placement_of(tmp_path, "fp8")))
    _check_parts(tmp_path, whole, "fp8", is_whole=is_whole, stays_quantised=stays_quantised)


def test_experts_in_one_tensor_of_fp8_are_refused(tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "block", **MIXTURE)
    placement = placement_of(tmp_path, has_merged_experts=True)
    with pytest.raises(StartupFailed, match=r"experts\.0\.gate_proj and others are one tensor"):
        make_decoder(read_model_config(tmp_path), placement)


@pytest.mark.parametrize("name", ["block", "compressed, channel"])
def test_tokens_of_experts_in_fp8(tmp_path: Path, name: str) -> None:
    theirs = write_fp8_checkpoint(tmp_path, name, seed=2, **MIXTURE)
    config = config_of(tmp_path)
    engine = LocalEngine(config, ModelRunner(config))
    prompt = tuple(random.Random(1).choices(range(3, 320), k=40))
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    request = Request(f"{1:032x}", 0, prompt, sampling)
    tokens = outputs_of(engine, [request])[request.key]
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*prompt, *tokens]])).logits[0]
    for token, row in zip(tokens, logits[len(prompt) - 1 : -1], strict=True):
        assert float(row.max() - row[token]) < NEAR_TIE
    engine.runner.close()


@pytest.mark.parametrize("name", ["block", "compressed, channel", None])
def test_the_bytes_of_experts_are_known(tmp_path: Path, name: str | None) -> None:
    quantization = None
    if name is None:
        write_checkpoint(tmp_path, **MIXTURE, save_original_format=False)
        quantization = "fp8"
    else:
        write_fp8_checkpoint(tmp_path, name, **MIXTURE)
    placement = placement_of(tmp_path, quantization, dtype=torch.bfloat16)
    model = make_decoder(read_model_config(tmp_path, quantization), placement)
    num_bytes = sum(target.nbytes for target in model.targets.values())
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", quantization=quantization)
    assert weights_bytes(config) == pytest.approx(num_bytes, rel=2e-2)
    dummy = dataclasses.replace(config, load_format="dummy")
    assert weights_bytes(dummy) == pytest.approx(num_bytes, rel=2e-2)
