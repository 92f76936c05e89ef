"""config.json in old and new formats, the model directory, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from baton.core import model_dir
from baton.core.errors import StartupFailed
from baton.core.model_dir import eos_token_ids, resolve_model_dir
from baton.engine.model.model_config import read_model_config
from baton.engine.model.rope_config import Llama3Scaling, RopeConfig

VOCAB = 1000
OLD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 300,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 777,
    "rope_theta": 1234.5,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(OLD | changes))
    return folder


def test_old_config_with_derived_values(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path))
    assert (config.num_kv_heads, config.head_dim) == (8, 16)
    assert config.rope == RopeConfig(1234.5, None)
    assert config.dtype == "bfloat16"
    assert not config.has_tied_embeddings
    assert config.rms_norm_eps == LlamaConfig().rms_norm_eps
    assert config.initializer_range == LlamaConfig().initializer_range


def test_config_that_transformers_writes(tmp_path: Path) -> None:
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        dtype="float16",
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        max_position_embeddings=512,
    ).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert (config.num_kv_heads, config.head_dim) == (2, 64)
    assert config.rope == RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))
    assert config.dtype == "float16"
    assert config.has_tied_embeddings and config.has_qkv_bias and not config.has_mlp_bias


@pytest.mark.parametrize("type_field", ["rope_type", "type"])
def test_old_rope_scaling(tmp_path: Path, type_field: str) -> None:
    config = read_model_config(write(tmp_path, rope_scaling={type_field: "llama3", **LLAMA3}))
    assert config.rope == RopeConfig(1234.5, Llama3Scaling(8.0, 1.0, 4.0, 64))
    assert read_model_config(write(tmp_path, rope_scaling=None)).rope.scaling is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FooForCausalLM"]}, "FooForCausalLM"),
        ({"architectures": None}, "not supported"),
        ({"architectures": [["LlamaForCausalLM"]]}, "not supported"),
        ({"auto_map": {"AutoModel": "evil.py"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "128"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_refusals_name_the_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupFailed, match=message):
        read_model_config(write(tmp_path, **changes))


def test_an_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed) as caught:
        read_model_config(write(tmp_path, architectures=["FooForCausalLM"]))
    assert "LlamaForCausalLM" in caught.value.hint


@pytest.mark.parametrize("text", ["", "[1]", '{"a": ', "\xff"])
def test_a_broken_config_is_a_startup_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(StartupFailed, match=r"config\.json"):
        read_model_config(tmp_path)


def test_resolve_takes_a_path_or_a_bundled_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model_dir(str(write(tmp_path))) == tmp_path
    monkeypatch.setattr(model_dir, "_BUNDLED_ROOT", tmp_path)
    with pytest.raises(StartupFailed) as caught:
        resolve_model_dir("demo-draft")
    assert "install it again" in caught.value.hint
    (tmp_path / "demo").mkdir()
    bundled = write(tmp_path / "demo")
    assert resolve_model_dir("demo") == bundled


def test_resolve_says_what_to_do_instead(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    hints = {
        "meta-llama/Llama-3.1-8B": "hf download meta-llama/Llama-3.1-8B",
        "nothing-here": "demo",
        str(tmp_path / "missing"): "give a path",
        str(tmp_path / "empty"): "config.json and",
        str(write(tmp_path) / "config.json"): "the directory that contains it",
    }
    for name, hint in hints.items():
        with pytest.raises(StartupFailed) as caught:
            resolve_model_dir(name)
        assert hint in caught.value.hint


def test_eos_ids_come_from_generation_config_first(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=5)
    assert eos_token_ids(tmp_path, VOCAB) == (5,)
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [7, 9]}')
    assert eos_token_ids(tmp_path, VOCAB) == (7, 9)
    generation.write_text('{"eos_token_id": null}')
    assert eos_token_ids(tmp_path, VOCAB) == (5,)
    assert eos_token_ids(write(tmp_path), VOCAB) == ()
    for wrong in ('"2"', "[1, -1]", "true", "1.5"):
        generation.write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(StartupFailed, match="eos_token_id"):
            eos_token_ids(tmp_path, VOCAB)


def test_eos_ids_that_the_vocabulary_lacks_end_nothing(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=[5, VOCAB - 1, VOCAB])
    assert eos_token_ids(tmp_path, VOCAB) == (5, VOCAB - 1)
