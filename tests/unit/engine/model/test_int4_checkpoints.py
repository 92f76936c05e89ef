"""int4 checkpoints on a CPU: each format gives the result of an explicit dequantisation."""

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
from int4_checkpoints import FORMATS, quantised, write_int4_checkpoint
from live_bytes import LiveBytes
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

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
from baton.kernels.experts.experts import ExpertWeights, Int4Experts
from baton.kernels.products.int4_weights import Int4Weight, dequantise, quantise_groups

# Aligned to groups and chunks, as released models are.
ALIGNED = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
UNALIGNED = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24}
NEAR_TIE = 1e-3


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    settings = {"device": "cpu", "num_kv_blocks": 60, "max_num_seqs": 8}
    return EngineConfig(model=str(folder), **(settings | changes))


def placement_of(folder: Path, quantization: str | None = None, **changes: Any) -> Placement:
    """A placement that keeps weights packed, as in the file or by --quantization."""
    settings: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "quantization": read_model_config(folder, quantization).quantization,
        "stays_quantised": True,
    }
    return Placement(**(settings | changes))


def rank_of(rank: int, size: int) -> Communicator:
    communicator = Communicator()
    communicator.rank, communicator.size = rank, size
    return communicator


def loaded(folder: Path, placement: Placement) -> Decoder:
    is_merged = any(map(is_merged_name, tensor_names(folder)))
    placement = dataclasses.replace(placement, has_merged_experts=is_merged)
    model = make_decoder(read_model_config(folder), placement)
    load_weights(folder, model.targets)
    return model


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    """All projections as floats, by layer and name."""
    found = {}
    for index, layer in enumerate(model.layers):
        attention, mlp = layer.attention, layer.mlp
        parts = {"qkv": attention.qkv, "out": attention.out}
        parts |= {"gate_up": mlp.gate_up, "down": mlp.down}
        for name, part in parts.items():
            weight = part.weight
            is_plain = isinstance(weight, torch.Tensor)
            found[f"{index}.{name}"] = weight if is_plain else weight.dequantised(torch.float32)
    return found


NAMES = {
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "out": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}


def expected_of(state: dict[str, torch.Tensor], place: str) -> torch.Tensor:
    index, part = place.split(".")
    return torch.cat([state[f"model.layers.{index}.{name}.weight"] for name in NAMES[part]])


def greedy(engine: LocalEngine) -> tuple[tuple[int, ...], list[int]]:
    prompt = tuple(random.Random(1).choices(range(3, 320), k=40))
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    request = Request(f"{1:032x}", 0, prompt, sampling)
    return prompt, list(outputs_of(engine, [request])[request.key])


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_tokens_are_those_of_the_dequantised_model(tmp_path: Path, name: str) -> None:
    # No multiples of 128 where the groups allow it: a CPU takes any size.
    sizes = ALIGNED if FORMATS[name].group_size in (64, 128) else UNALIGNED
    theirs = write_int4_checkpoint(tmp_path, name, is_sharded="zeros" in name, seed=2, **sizes)
    config = config_of(tmp_path)
    engine = LocalEngine(config, ModelRunner(config))
    prompt, tokens = greedy(engine)
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*prompt, *tokens]])).logits[0]
    for token, row in zip(tokens, logits[len(prompt) - 1 : -1], strict=True):
        assert float(row.max() - row[token]) < NEAR_TIE
    engine.runner.close()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stays_quantised", [False, True])
def test_weights_are_those_of_the_file(tmp_path: Path, name: str, stays_quantised: bool) -> None:
    theirs = write_int4_checkpoint(tmp_path, name, **ALIGNED)
    model = loaded(tmp_path, placement_of(tmp_path, stays_quantised=stays_quantised))
    weight, state = model.layers[0].attention.qkv.weight, theirs.state_dict()
    assert isinstance(weight, Int4Weight if stays_quantised else torch.Tensor)
    for place, found in weights_of(model).items():
        # A float32 scale has 24 significant bits and loses eight of them if weights stay packed.
        rtol = 2**-16 if FORMATS[name].scale_dtype == torch.float32 and stays_quantised else 0
        torch.testing.assert_close(found, expected_of(state, place), rtol=rtol, atol=0)
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stays_quantised", [False, True])
def test_each_rank_has_its_part(tmp_path: Path, name: str, stays_quantised: bool) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    theirs = write_int4_checkpoint(tmp_path, name, **sizes)
    check_divisible(read_model_config(tmp_path), 2)
    state, parts = theirs.state_dict(), []
    for rank in range(2):
        changes = {"communicator": rank_of(rank, 2), "stays_quantised": stays_quantised}
        model = loaded(tmp_path, placement_of(tmp_path, **changes))
        assert isinstance(model.layers[0].mlp.down.weight, Int4Weight) == stays_quantised
        parts.append(weights_of(model))

    def close(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=2**-16, atol=0)

    for place in ("0.out", "1.down"):
        close(torch.cat([part[place] for part in parts], dim=1), expected_of(state, place))
    gate_up = expected_of(state, "0.gate_up")
    for first in (0, 256):  # gate, up
        of_ranks = torch.cat([part["0.gate_up"][first : first + 256] for part in parts])
        close(of_ranks, gate_up[2 * first : 2 * first + 512])
    qkv = expected_of(state, "1.qkv")
    close(torch.cat([part["1.qkv"][:128] for part in parts]), qkv[:256])
    close(torch.cat([part["1.qkv"][192:] for part in parts]), qkv[384:])


def test_a_rank_s_part_of_a_head_may_begin_within_a_word(tmp_path: Path) -> None:
    """Of 328 tokens, each of two ranks has 164: 20.5 words of packed zero points."""
    sizes = ALIGNED | {"vocab_size": 328}
    theirs = write_int4_checkpoint(tmp_path, "gptq, groups of 64, its head", **sizes)
    parts = []
    for rank in range(2):
        model = loaded(tmp_path, placement_of(tmp_path, communicator=rank_of(rank, 2)))
        parts.append(model.lm_head.weight)
    assert torch.equal(torch.cat(parts), theirs.state_dict()["lm_head.weight"])


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("gptq", {"intermediate_size": 384}, "groups of 128: 192 of the intermediate_size"),
        ("awq", {"head_dim": 48}, "groups of 128: 96 of the heads"),
        ("awq, groups of 32", {"head_dim": 12, "num_attention_heads": 8}, "groups of 32: 48"),
        ("compressed, channel", {"intermediate_size": 168}, "groups of 8: 84"),
    ],
)
def test_a_tensor_parallel_size_that_cuts_groups_is_refused(
    tmp_path: Path, name: str, sizes: dict[str, int], message: str
) -> None:
    write_checkpoint(tmp_path, **(ALIGNED | sizes))
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"quantization_config": FORMATS[name].config}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(StartupFailed, match=message) as caught:
        ModelRunner(config_of(tmp_path, tensor_parallel_size=2), None, rank_of(0, 2))
    assert "--tp 1" in caught.value.hint


def test_quantised_at_load_to_the_nearest_alike_on_all_ranks(tmp_path: Path) -> None:
    sizes = ALIGNED | {"intermediate_size": 512}
    state = write_checkpoint(tmp_path, **sizes).state_dict()
    model = loaded(tmp_path, placement_of(tmp_path, "int4"))
    found = weights_of(model)
    assert isinstance(model.layers[1].mlp.down.weight, Int4Weight)
    for place, weight in found.items():
        expected = expected_of(state, place)
        largest = expected.unflatten(1, (-1, 128)).abs().amax(2).repeat_interleave(128, 1)
        # The largest weight may be clipped, if a smaller scale is better for all others.
        assert ((weight - expected).abs() <= largest * 0.22).all()
        assert 0.05 < (weight - expected).norm() / expected.norm() < 0.11
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])
    floats = loaded(tmp_path, placement_of(tmp_path, "int4", stays_quantised=False))
    torch.testing.assert_close(weights_of(floats), found, rtol=2**-15, atol=0)
    for stays_quantised, exactly in ((True, found), (False, weights_of(floats))):
        changes = {"communicator": rank_of(1, 2), "stays_quantised": stays_quantised}
        part = weights_of(loaded(tmp_path, placement_of(tmp_path, "int4", **changes)))
        assert torch.equal(part["1.down"], exactly["1.down"][:, 256:])


def test_quantised_at_load_of_no_whole_groups(tmp_path: Path) -> None:
    """A matrix whose last group is incomplete fits no kernel's layout and becomes floats."""
    write_checkpoint(tmp_path, **UNALIGNED)
    packed_or_not = [
        weights_of(loaded(tmp_path, placement_of(tmp_path, "int4", stays_quantised=stays)))
        for stays in (False, True)
    ]
    assert all(torch.equal(one, packed_or_not[1][key]) for key, one in packed_or_not[0].items())
    changes = {"communicator": rank_of(1, 2), "stays_quantised": False}
    part = weights_of(loaded(tmp_path, placement_of(tmp_path, "int4", **changes)))
    assert torch.equal(part["1.down"], packed_or_not[0]["1.down"][:, 80:])
    config = config_of(tmp_path, quantization="int4")
    engine = LocalEngine(config, ModelRunner(config))
    assert len(greedy(engine)[1]) == 12
    engine.runner.close()


@pytest.mark.parametrize("name", ["gptq", pytest.param("compressed", marks=pytest.mark.slow), None])
def test_loading_holds_the_result_and_a_layer(tmp_path: Path, name: str | None) -> None:
    hidden = 1024 if name is None else 512
    sizes = {"hidden_size": hidden, "intermediate_size": 4096, "num_hidden_layers": 3}
    sizes |= {"head_dim": 64, "num_attention_heads": 4}
    if name is None:
        write_checkpoint(tmp_path, **sizes).to(torch.bfloat16).save_pretrained(tmp_path)
    else:
        write_int4_checkpoint(tmp_path, name, **sizes)
    layer_bytes = 2 * hidden * (3 * 4096 + 2 * 256 + 2 * 128)  # in bfloat16
    quantization = "int4" if name is None else None
    with LiveBytes() as live:
        placement = placement_of(tmp_path, quantization, dtype=torch.bfloat16)
        model = make_decoder(read_model_config(tmp_path, quantization), placement)
        load_weights(tmp_path, model.targets)
        num_bytes = sum(target.nbytes for target in model.targets.values())
    assert num_bytes < live.most < num_bytes + layer_bytes
    assert 3 * layer_bytes > 3 * (num_bytes - model.embed.weight.nbytes * 2)


def test_dummy_weights_are_the_same_packed_or_not(tmp_path: Path) -> None:
    write_int4_checkpoint(tmp_path, "gptq", **ALIGNED)
    found = []
    for stays_quantised in (False, True):
        placement = placement_of(tmp_path, stays_quantised=stays_quantised)
        model = make_decoder(read_model_config(tmp_path), placement)
        fill_dummy_weights(model.targets, std=0.02, seed=3)
        found.append(weights_of(model))
    torch.testing.assert_close(found[0], found[1], rtol=2**-15, atol=0)
    assert found[0]["0.qkv"].std().item() == pytest.approx(0.02, rel=0.05)


def damage(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


Q = "model.layers.1.self_attn.q_proj"


def _holding(value: float, *shape: int) -> torch.Tensor:
    scale = torch.full(shape, 0.01, dtype=torch.float16)
    scale.view(-1)[1] = value
    return scale


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", {f"{Q}.scales": None}, rf"lacks the tensor {Q}\.scales"),
        ("gptq", {f"{Q}.qweight": None}, rf"lacks the tensor {Q}\.qweight"),
        ("awq", {f"{Q}.qzeros": None}, rf"lacks the tensor {Q}\.qzeros"),
        ("gptq", {f"{Q}.scales": _holding(0.0, 2, 256)}, rf"{Q}\.scales in .*safetensors .*as 0"),
        ("awq", {f"{Q}.scales": _holding(-1.0, 2, 256)}, "such as -1"),
        ("awq", {f"{Q}.scales": _holding(float("nan"), 2, 256)}, "such as nan"),
        ("gptq", {f"{Q}.scales": _holding(float("inf"), 2, 256)}, "such as inf"),
        ("gptq", {f"{Q}.scales": _holding(1.0, 4, 256)}, r"shape \[4, 256\].*\[2, 256\]"),
        ("gptq", {f"{Q}.scales": torch.ones(2, 256).int()}, "type I32, not F16"),
        ("gptq", {f"{Q}.qweight": torch.ones(32, 128).int()}, r"\[32, 128\].*\[32, 256\]"),
        ("gptq", {f"{Q}.qweight": torch.ones(32, 256)}, "type F32, not I32"),
        ("awq", {f"{Q}.qweight": torch.ones(32, 256).int()}, r"\[32, 256\].*\[256, 32\]"),
        ("awq", {f"{Q}.qzeros": torch.ones(2, 256).int()}, r"\[2, 256\].*\[2, 32\]"),
        ("gptq", {f"{Q}.g_idx": torch.arange(256).int() % 2}, rf"{Q}\.g_idx in .*another order"),
        ("gptq", {f"{Q}.g_idx": torch.zeros(255).int()}, r"\[255\].*\[256\]"),
        ("gptq", {f"{Q}.bias": torch.ones(256)}, rf"{Q}\.bias in .*no such bias"),
        ("gptq", {f"{Q}.weight": torch.ones(256, 256)}, rf"{Q}\.weight, which its architecture"),
        ("awq", {f"{Q}.g_idx": torch.zeros(256).int()}, "g_idx, which its architecture"),
        ("compressed", {f"{Q}.weight_shape": torch.tensor([256, 128])}, r"is \[256, 128\]"),
        ("compressed", {f"{Q}.weight_shape": None}, "lacks"),
        ("compressed", {f"{Q}.weight_scale": torch.ones(256, 1)}, r"\[256, 1\].*\[256, 2\]"),
        ("compressed", {f"{Q}.weight_zero_point": torch.ones(32, 2).int()}, "weight_zero_point"),
        ("compressed", {f"{Q}.weight_g_idx": torch.arange(256) % 2}, "another order"),
    ],
)
def test_what_is_wrong_is_named_before_memory_is_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: dict[str, torch.Tensor | None],
    message: str,
) -> None:
    write_int4_checkpoint(tmp_path, name, **ALIGNED)
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


def test_what_is_no_harm_is_taken(tmp_path: Path) -> None:
    """Zero biases (of an older tool) and a missing g_idx without desc_act are accepted."""
    write_int4_checkpoint(tmp_path, "gptq", **ALIGNED)
    damage(tmp_path, {f"{Q}.bias": torch.zeros(256), f"{Q}.g_idx": None})
    ModelRunner(config_of(tmp_path)).close()


def test_an_order_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    write_int4_checkpoint(tmp_path, "gptq", **ALIGNED)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"]["desc_act"] = True
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ModelRunner(config_of(tmp_path)).close()  # the g_idx in the file is the usual order
    damage(tmp_path, {f"{Q}.g_idx": None})
    with pytest.raises(StartupFailed, match=rf"lacks the tensor {Q}\.g_idx"):
        ModelRunner(config_of(tmp_path))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write_int4_checkpoint(tmp_path, "awq", **ALIGNED)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StartupFailed, match=r"model\.safetensors"):
        ModelRunner(config_of(tmp_path))


def test_sizes_that_groups_do_not_divide_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"quantization_config": FORMATS["gptq"].config}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(StartupFailed, match=r"q_proj has 96 inputs: no multiple of 128"):
        ModelRunner(config_of(tmp_path))


GPTQ, AWQ = FORMATS["gptq"].config, FORMATS["awq"].config
COMPRESSED = FORMATS["compressed"].config
GROUP = COMPRESSED["config_groups"]["group_0"]


def _with_weights(**changes: Any) -> dict[str, Any]:
    group = GROUP | {"weights": GROUP["weights"] | changes}
    return COMPRESSED | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ | {"bits": 8}, "bits 8"),
        (GPTQ | {"bits": None}, "bits None"),
        (GPTQ | {"group_size": 256}, "group_size 256"),
        (GPTQ | {"group_size": True}, "group_size True"),
        (GPTQ | {"group_size": [128]}, r"group_size \[128\]"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"+:.*q_proj": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"modules_in_block_to_quantize": [["q_proj"]]}, "modules_in_block"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point false"),
        (AWQ | {"bits": 3}, "bits 3"),
        (AWQ | {"modules_to_not_convert": ["q_proj"]}, "only some of"),
        (_with_weights(num_bits=8), "integers of 4 bits"),
        (_with_weights(type="float"), "integers of 4 bits"),
        (_with_weights(strategy="tensor"), "strategy 'tensor'"),
        (_with_weights(group_size=100), "group_size 100"),
        (_with_weights(actorder="dynamic"), "actorder 'dynamic'"),
        (COMPRESSED | {"format": "marlin-24"}, "format 'marlin-24'"),
        (
            COMPRESSED | {"config_groups": {"a": GROUP | {"input_activations": {"num_bits": 8}}}},
            "input_activations",
        ),
    ],
)
def test_unsupported_formats_are_named(tmp_path: Path, config: Any, message: str) -> None:
    write_checkpoint(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    with pytest.raises(StartupFailed, match=message):
        ModelRunner(config_of(tmp_path))


def test_engines_of_different_quantisation_have_different_fingerprints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **ALIGNED)
    found = []
    for quantization in (None, "fp8", "int4"):
        runner = ModelRunner(config_of(tmp_path, quantization=quantization))
        found.append(runner.fingerprint["model"])
        runner.close()
    assert len(set(found)) == 3


@pytest.mark.parametrize("name", ["gptq", "compressed, zeros", "awq, groups of 32", None])
def test_the_bytes_of_weights_are_known_before_they_are_read(
    tmp_path: Path, name: str | None
) -> None:
    quantization = None
    if name is None:
        write_checkpoint(tmp_path, **ALIGNED)
        quantization = "int4"
    else:
        write_int4_checkpoint(tmp_path, name, **ALIGNED)
    placement = placement_of(tmp_path, quantization, dtype=torch.bfloat16)
    model = make_decoder(read_model_config(tmp_path, quantization), placement)
    num_bytes = sum(target.nbytes for target in model.targets.values())
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", quantization=quantization)
    dummy = dataclasses.replace(config, load_format="dummy")
    assert weights_bytes(config) == pytest.approx(num_bytes, rel=2e-2)
    assert weights_bytes(dummy) == pytest.approx(num_bytes, rel=2e-2)
    floats = make_decoder(
        read_model_config(tmp_path), placement_of(tmp_path, stays_quantised=False)
    )
    num_bytes = sum(target.nbytes for target in floats.targets.values())
    in_floats = dataclasses.replace(config, dtype="float32")
    assert weights_bytes(in_floats) == pytest.approx(num_bytes, rel=2e-2)


MIXTURE = (
    VARIANTS["qwen3-moe, a dense layer"]
    | ALIGNED
    | {
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
    }
)


def experts_of(model: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate_up, down) of the first layer, as floats: [experts, outputs, inputs]."""
    mixture, found = model.layers[0].mlp.mixture, []
    for weights in (mixture.gate_up, mixture.down):
        each = [weights.of(expert) for expert in range(weights.num_experts)]
        plain = [w if isinstance(w, torch.Tensor) else w.dequantised(torch.float32) for w in each]
        found.append(torch.stack(plain))
    return found[0], found[1]


def are_packed(model: Decoder) -> bool:
    mixture = model.layers[0].mlp.mixture
    kinds = {type(mixture.gate_up), type(mixture.down)}
    assert kinds in ({Int4Experts}, {ExpertWeights})
    return kinds == {Int4Experts}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stays_quantised", [pytest.param(False, marks=pytest.mark.slow), True])
def test_experts_are_those_of_the_file(tmp_path: Path, name: str, stays_quantised: bool) -> None:
    theirs = write_int4_checkpoint(tmp_path, name, **MIXTURE).state_dict()
    model = loaded(tmp_path, placement_of(tmp_path, stays_quantised=stays_quantised))
    assert are_packed(model) == stays_quantised
    rtol = 2**-16 if FORMATS[name].scale_dtype == torch.float32 and stays_quantised else 0
    for part, found in zip(("gate_up", "down"), experts_of(model), strict=True):
        expected = theirs[f"model.layers.0.mlp.experts.{part}_proj"]
        torch.testing.assert_close(found, expected, rtol=rtol, atol=0)
    gate = "model.layers.0.mlp.gate.weight"
    assert torch.equal(model.layers[0].mlp.mixture.router, theirs[gate])


@pytest.mark.parametrize("name", ["gptq", "awq, groups of 32", "compressed, channel"])
@pytest.mark.parametrize("stays_quantised", [False, True])
@pytest.mark.parametrize("is_whole", [True, False])
def test_ranks_share_experts(
    tmp_path: Path, name: str, stays_quantised: bool, is_whole: bool
) -> None:
    """Each rank holds whole experts, or a part of each expert."""
    write_int4_checkpoint(tmp_path, name, **MIXTURE)
    config = read_model_config(tmp_path)
    check_divisible(config, 2, has_expert_parallel=is_whole, stays_quantised=stays_quantised)
    whole = loaded(tmp_path, placement_of(tmp_path, stays_quantised=stays_quantised))
    check_parts(tmp_path, whole, None, is_whole=is_whole, stays_quantised=stays_quantised)


def check_parts(
    folder: Path, whole: Decoder, quantization: str | None, *, is_whole: bool, stays_quantised: bool
) -> None:
    parts = []
    for rank in range(2):
        changes = {"communicator": rank_of(rank, 2), "has_expert_parallel": is_whole}
        placement = placement_of(folder, quantization, stays_quantised=stays_quantised, **changes)
        model = loaded(folder, placement)
        assert are_packed(model) == stays_quantised
        parts.append(experts_of(model))
    (gate_up, down), (gate_ups, downs) = experts_of(whole), zip(*parts, strict=True)
    assert torch.equal(torch.cat(downs, dim=0 if is_whole else 2), down)
    if not is_whole:  # the gates of all ranks, then their up projections
        gate_ups = [half for n in range(2) for half in (one.chunk(2, 1)[n] for one in gate_ups)]
    assert torch.equal(torch.cat(gate_ups, dim=0 if is_whole else 1), gate_up)


@pytest.mark.parametrize("is_merged", [False, True])
def test_experts_are_quantised_at_load(tmp_path: Path, is_merged: bool) -> None:
    """Experts quantised at load are equal packed or not, and on any number of ranks."""
    state = write_checkpoint(tmp_path, **MIXTURE, save_original_format=not is_merged).state_dict()
    whole = [
        loaded(tmp_path, placement_of(tmp_path, "int4", stays_quantised=stays))
        for stays in (False, True)
    ]
    assert [are_packed(model) for model in whole] == [False, True]
    for part, plain, packed in zip(("gate_up", "down"), *map(experts_of, whole), strict=True):
        weights = state[f"model.layers.0.mlp.experts.{part}_proj"]
        made = [dequantise(*quantise_groups(weight, 128), 128) for weight in weights]
        assert torch.equal(plain, torch.stack(made))
        torch.testing.assert_close(packed, plain, rtol=2**-15, atol=0)
    for is_whole in (True, False):
        for stays, model in enumerate(whole):
            settings = {"is_whole": is_whole, "stays_quantised": bool(stays)}
            check_parts(tmp_path, model, "int4", **settings)


def test_experts_whose_parts_no_kernel_has_become_floats(tmp_path: Path) -> None:
    """Both matrices become floats if a rank's part of the inner dimension is no multiple of 128."""
    write_checkpoint(tmp_path, **(MIXTURE | {"moe_intermediate_size": 128}))
    assert are_packed(loaded(tmp_path, placement_of(tmp_path, "int4")))
    changes = {"communicator": rank_of(1, 2), "has_expert_parallel": False}
    assert not are_packed(loaded(tmp_path, placement_of(tmp_path, "int4", **changes)))
    changes |= {"has_expert_parallel": True}
    assert are_packed(loaded(tmp_path, placement_of(tmp_path, "int4", **changes)))


@pytest.mark.parametrize("name", ["awq", None])
def test_loading_experts_holds_the_result_and_a_layer(tmp_path: Path, name: str | None) -> None:
    sizes = MIXTURE | {"moe_intermediate_size": 512, "num_experts": 16}
    if name is None:
        model = write_checkpoint(tmp_path, **sizes, save_original_format=False)
        model.to(torch.bfloat16).save_pretrained(tmp_path, save_original_format=False)
    else:
        write_int4_checkpoint(tmp_path, name, **sizes)
    layer_bytes = 2 * 16 * 3 * 256 * 512  # in bfloat16
    quantization = "int4" if name is None else None
    with LiveBytes() as live:
        changes = {"dtype": torch.bfloat16, "has_merged_experts": name is None}
        placement = placement_of(tmp_path, quantization, **changes)
        model = make_decoder(read_model_config(tmp_path, quantization), placement)
        load_weights(tmp_path, model.targets)
        num_bytes = sum(target.nbytes for target in model.targets.values())
    assert num_bytes < live.most < num_bytes + layer_bytes


def test_dummy_experts_are_the_same_packed_or_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **MIXTURE)
    found = []
    for changes in ({"stays_quantised": False}, {}, {"communicator": rank_of(1, 2)}):
        placement = placement_of(tmp_path, "int4", has_expert_parallel=True, **changes)
        model = make_decoder(read_model_config(tmp_path, "int4"), placement)
        fill_dummy_weights(model.targets, std=0.02, seed=3)
        found.append(experts_of(model))
    for plain, packed, of_rank in zip(*found, strict=True):
        torch.testing.assert_close(packed, plain, rtol=2**-15, atol=0)
        assert torch.equal(of_rank, packed[3:])


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("gptq", 256),
        ("awq, groups of 32", 256),
        ("awq, groups of 32", 160),
        (None, 256),
        (None, 160),
    ],
)
def test_the_bytes_of_experts_are_known(tmp_path: Path, name: str | None, inner: int) -> None:
    """The predicted bytes of expert weights are right for packed and unpacked layouts."""
    sizes, quantization = MIXTURE | {"moe_intermediate_size": inner}, None
    if name is None:
        write_checkpoint(tmp_path, **sizes)
        quantization = "int4"
    else:
        write_int4_checkpoint(tmp_path, name, **sizes)
    placement = placement_of(tmp_path, quantization, dtype=torch.bfloat16)
    model = make_decoder(read_model_config(tmp_path, quantization), placement)
    num_bytes = sum(target.nbytes for target in model.targets.values())
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", quantization=quantization)
    assert weights_bytes(config) == pytest.approx(num_bytes, rel=2e-2)
    dummy = dataclasses.replace(config, load_format="dummy")
    assert weights_bytes(dummy) == pytest.approx(num_bytes, rel=2e-2)


def test_experts_are_dequantised(tmp_path: Path) -> None:
    name, sizes = "gptq, channel", VARIANTS["qwen3-moe, a dense layer"]
    write_int4_checkpoint(tmp_path / "int4", name, **sizes)
    write_checkpoint(tmp_path / "plain", **sizes)
    model = loaded(tmp_path / "int4", placement_of(tmp_path / "int4"))
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    weight = "model.layers.0.mlp.experts.3.down_proj.weight"
    expected = quantised(plain[weight], FORMATS[name]).meant
    assert torch.equal(model.targets[weight].tensor, expected)
    assert torch.equal(model.layers[0].mlp.mixture.router, plain["model.layers.0.mlp.gate.weight"])


def test_layers_multiply_as_their_dequantised_weights_do(tmp_path: Path) -> None:
    """The reference operations with packed weights equal products with the dequantised weights."""
    write_int4_checkpoint(tmp_path, "awq", **ALIGNED)
    placement = placement_of(tmp_path)
    model = loaded(tmp_path, placement)
    part = model.layers[0].mlp.gate_up
    assert isinstance(part.weight, Int4Weight) and part.fp8_weight is None
    x = torch.randn(3, 256)
    expected = linear(x.double(), part.weight.dequantised(torch.float64))
    torch.testing.assert_close(part.product(x).double(), expected, rtol=1e-5, atol=1e-5)
