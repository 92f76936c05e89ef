"""How each architecture's config.json is interpreted, in the current and older formats of
transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton.core.errors import StartupFailed
from baton.engine.kv.kv_memory import KvLayout
from baton.engine.model.fingerprint import fingerprint_fields, short
from baton.engine.model.model_config import ARCHITECTURES, ModelConfig, read_model_config
from baton.engine.model.rope_config import LinearScaling, RopeConfig, YarnScaling

SIZES: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 64}


def read(folder: Path, architecture: str, **changes: Any) -> ModelConfig:
    """The model config read from a hand-written config.json."""
    values = SIZES | {"architectures": [architecture]} | changes
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_config(folder)


KIN = {"MiMoForCausalLM": "Qwen2ForCausalLM"}  # not in transformers: has this decoder


def written(folder: Path, architecture: str, **changes: Any) -> ModelConfig:
    """The model config read back from what transformers writes."""
    config_class = getattr(transformers, KIN.get(architecture, architecture)).config_class
    config_class(architectures=[architecture], **(SIZES | changes)).save_pretrained(folder)
    return read_model_config(folder)


def weight_names(architecture: str, **changes: Any) -> set[str]:
    architecture = KIN.get(architecture, architecture)
    config_class = getattr(transformers, architecture).config_class
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config_class(**(SIZES | changes)))
    return {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("attention_bias", [False, True])
def test_the_table_agrees_with_the_weights_of_transformers(
    tmp_path: Path, architecture: str, attention_bias: bool
) -> None:
    changes = {"attention_bias": attention_bias, "mlp_bias": attention_bias}
    experts = ARCHITECTURES[architecture].experts
    if experts is not None:
        changes |= EXPERTS | {"mlp_only_layers": [1]} | SHARED
    if architecture == "MixtralForCausalLM":
        changes = {"num_local_experts": 6, "num_experts_per_tok": 2}  # in all layers
    config = written(tmp_path, architecture, **changes)
    names = weight_names(architecture, **changes)
    attention = "model.layers.0.self_attn"
    assert config.has_qkv_bias == (f"{attention}.q_proj.bias" in names)
    assert config.has_output_bias == (f"{attention}.o_proj.bias" in names)
    assert config.has_mlp_bias == ("model.layers.1.mlp.down_proj.bias" in names)
    assert config.has_qk_norm == (f"{attention}.k_norm.weight" in names)
    sparse = {n for n in range(4) if f"model.layers.{n}.mlp.gate.weight" in names}
    assert set(config.experts.layers if config.experts else ()) == sparse
    has_shared = "model.layers.0.mlp.shared_expert_gate.weight" in names
    assert has_shared == (experts is not None and experts.has_shared)


@pytest.mark.parametrize(
    ("architecture", "head_dim"),
    [("Qwen3ForCausalLM", 128), ("Qwen2ForCausalLM", 24), ("MistralForCausalLM", 24)],
)
def test_default_head_dim(tmp_path: Path, architecture: str, head_dim: int) -> None:
    assert read(tmp_path, architecture).head_dim == head_dim
    assert written(tmp_path, architecture).head_dim == head_dim
    assert read(tmp_path, architecture, head_dim=32).head_dim == 32


@pytest.mark.parametrize("source", [read, written])
def test_windows(tmp_path: Path, source: Any) -> None:
    requested = {"use_sliding_window": True, "sliding_window": 64}
    none, everywhere, upper = (None,) * 4, (64,) * 4, (None, None, 64, 64)
    llama, mistral = "LlamaForCausalLM", "MistralForCausalLM"
    assert source(tmp_path, llama, sliding_window=64).windows == none
    assert source(tmp_path, mistral, sliding_window=64).windows == everywhere
    assert source(tmp_path, mistral, sliding_window=None).windows == none
    for qwen in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert source(tmp_path, qwen, sliding_window=64).windows == none
        assert (
            source(tmp_path, qwen, **requested).windows == none
        )  # the first 28 layers have no window
        assert source(tmp_path, qwen, **requested, max_window_layers=2).windows == upper
        assert source(tmp_path, qwen, **requested, max_window_layers=0).windows == everywhere
        kinds = ["sliding_attention", "full_attention"] * 2
        assert source(tmp_path, qwen, **requested, layer_types=kinds).windows == (
            64,
            None,
            64,
            None,
        )
    moe = {**EXPERTS, "max_window_layers": 2}
    assert source(tmp_path, "Qwen3MoeForCausalLM", **moe, sliding_window=64).windows == none
    assert source(tmp_path, "Qwen3MoeForCausalLM", **moe, **requested).windows == everywhere


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("MistralForCausalLM", {"sliding_window": 9, "layer_types": ["full_attention"] * 4}, "typ"),
        ("LlamaForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 3}, "one entry for each"),
        ("Qwen3ForCausalLM", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window"),
        ("Qwen2ForCausalLM", {"use_sliding_window": "yes"}, "use_sliding_window"),
        ("Qwen3MoeForCausalLM", {}, "num_local_experts"),
        ("Qwen2MoeForCausalLM", EXPERTS, "shared_expert_intermediate_size"),
        ("Qwen2MoeForCausalLM", EXPERTS | SHARED | {"use_sliding_window": True}, "sliding_window"),
        ("Qwen3MoeForCausalLM", EXPERTS | {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("Qwen3MoeForCausalLM", EXPERTS | {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ("Qwen3MoeForCausalLM", EXPERTS | {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": ["yarn"], "factor": 2.0}}, "yarn"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic"}}, "factor"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "below 1"),
        ("LlamaForCausalLM", {"rope_theta": 1}, "rope_theta"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2},
            "head_dim is 2",
        ),
    ],
)
def test_refusals_name_the_field(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupFailed, match=message):
        read(tmp_path, architecture, **changes)


def test_experts_of_old_and_new_names(tmp_path: Path) -> None:
    new = {"num_local_experts" if k == "num_experts" else k: v for k, v in EXPERTS.items()}
    moe = "Qwen3MoeForCausalLM"
    config = read(tmp_path, moe, **EXPERTS, decoder_sparse_step=2)
    assert config.experts is not None and config.experts.layers == (1, 3)
    assert read(tmp_path, moe, **new, decoder_sparse_step=2) == config
    assert read(tmp_path, moe, **EXPERTS, norm_topk_prob=True).experts != config.experts


def test_what_mixtures_of_experts_differ_in(tmp_path: Path) -> None:
    few = {"num_local_experts": 4, "num_experts_per_tok": 2}
    mixtral = read(tmp_path, "MixtralForCausalLM", **few).experts
    assert mixtral is not None and mixtral.has_normed_weights and mixtral.layers == (0, 1, 2, 3)
    assert mixtral.intermediate_size == SIZES["intermediate_size"]
    qwen2 = read(tmp_path, "Qwen2MoeForCausalLM", **EXPERTS, **SHARED)
    assert qwen2.experts is not None and qwen2.experts.shared_intermediate_size == 64
    assert qwen2.has_qkv_bias and not qwen2.has_output_bias
    unbiased = read(tmp_path, "Qwen2MoeForCausalLM", **EXPERTS, **SHARED, qkv_bias=False)
    assert not unbiased.has_qkv_bias


def test_rope_parameters_by_layer_type(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    wanted = RopeConfig(5e5, LinearScaling(2.0))
    same = {"full_attention": linear, "sliding_attention": linear}
    assert read(tmp_path, "Qwen2ForCausalLM", rope_parameters=same).rope == wanted
    differing = {"full_attention": linear, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(StartupFailed, match="differ between layer types"):
        read(tmp_path, "Qwen2ForCausalLM", rope_parameters=differing)
    full = ["full_attention"] * 4  # no layer uses the other RoPE
    config = read(tmp_path, "Qwen2ForCausalLM", rope_parameters=differing, layer_types=full)
    assert config.rope == wanted


def test_the_older_rope_scaling_wins_as_in_transformers(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "Qwen2ForCausalLM",
        rope_theta=1e6,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        rope_parameters={"rope_type": "default", "rope_theta": 3.0},
    )
    assert config.rope.theta == 1e6
    assert isinstance(config.rope.scaling, YarnScaling)
    assert config.max_context_tokens == 4 * 512


def test_fingerprints_cover_all_that_changes_the_kv(tmp_path: Path) -> None:
    def fingerprint(architecture: str, **changes: Any) -> str:
        layout = KvLayout(4, 2, 16, 24, torch.float32)
        config = read(tmp_path, architecture, **({"head_dim": 24} | changes))
        return short(fingerprint_fields(config, "weights", layout, torch.float32, "auto"))

    def scaled(kind: str, **changes: Any) -> dict[str, Any]:
        return {"rope_scaling": {"type": kind, "factor": 2.0} | changes}

    llama, qwen, moe = "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
    requested = {"use_sliding_window": True, "sliding_window": 64}
    different = [
        fingerprint(llama),
        fingerprint(llama, rope_theta=5e5),
        fingerprint(llama, rms_norm_eps=1e-5),
        fingerprint(llama, **scaled("linear")),
        fingerprint(llama, **scaled("linear", factor=3.0)),
        fingerprint(llama, **scaled("dynamic")),
        fingerprint(llama, **scaled("dynamic"), max_position_embeddings=256),
        fingerprint(llama, **scaled("yarn")),
        fingerprint(llama, **scaled("yarn", beta_fast=16)),
        fingerprint(llama, **scaled("yarn", attention_factor=1.0)),
        fingerprint(llama, **scaled("yarn", truncate=False)),
        fingerprint(llama, **scaled("yarn", original_max_position_embeddings=64)),
        fingerprint("MistralForCausalLM", sliding_window=64),
        fingerprint("MistralForCausalLM", sliding_window=65),
        fingerprint("MistralForCausalLM", sliding_window=None),
        fingerprint(qwen),
        fingerprint(qwen, **requested, max_window_layers=1),
        fingerprint(qwen, **requested, max_window_layers=2),
        fingerprint(moe, **EXPERTS),
        fingerprint(moe, **EXPERTS, norm_topk_prob=True),
        fingerprint(moe, **EXPERTS | {"num_experts_per_tok": 3}),
        fingerprint(moe, **EXPERTS, mlp_only_layers=[0]),
    ]
    assert len(set(different)) == len(different)
    # These change no result: the length limit, the dtype of the file, a window that is not used.
    assert fingerprint(llama, max_position_embeddings=256, torch_dtype="float16") == different[0]
    assert fingerprint(qwen, sliding_window=64, max_window_layers=1) == fingerprint(qwen)


def test_the_documentation_lists_every_architecture() -> None:
    text = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
    assert not [name for name in ARCHITECTURES if f"`{name}`" not in text], "docs/models.md"
