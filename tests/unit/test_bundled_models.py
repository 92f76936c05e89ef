"""The model folders that ship with Baton: sizes, configs, weight names and the shared tokenizer."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

MODELS = Path(__file__).resolve().parents[2] / "models"
MAX_BYTES = {"demo": 12_000_000, "demo-draft": 3_000_000}
END = "<|endoftext|>"


def read_json(name: str, file: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((MODELS / name / file).read_text())
    return value


def read_weights_header(name: str) -> dict[str, Any]:
    """The safetensors header: an eight-byte length, then JSON."""
    with (MODELS / name / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return header


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))


@pytest.mark.parametrize("name", MAX_BYTES)
def test_weights_fit_their_limit(name: str) -> None:
    assert (MODELS / name / "model.safetensors").stat().st_size <= MAX_BYTES[name]


@pytest.mark.parametrize("name", MAX_BYTES)
def test_config_describes_a_llama(name: str) -> None:
    config = read_json(name, "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["head_dim"] == 64
    assert config["rope_theta"] == 10_000.0
    assert config["max_position_embeddings"] == 2048
    assert config["vocab_size"] == 4096
    assert config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["bos_token_id"] is None
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"]
    assert config["eos_token_id"] == read_json(name, "generation_config.json")["eos_token_id"]


@pytest.mark.parametrize("name", MAX_BYTES)
def test_weights_are_bf16_under_llama_names(name: str) -> None:
    config, header = read_json(name, "config.json"), read_weights_header(name)
    header.pop("__metadata__")
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * dim
    keys = config["num_key_value_heads"] * dim
    expected = {"model.embed_tokens.weight": [4096, hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        in_layer = {
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            "self_attn.q_proj": [queries, hidden],
            "self_attn.k_proj": [keys, hidden],
            "self_attn.v_proj": [keys, hidden],
            "self_attn.o_proj": [hidden, queries],
            "mlp.gate_proj": [inner, hidden],
            "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner],
        }
        expected |= {f"model.layers.{layer}.{key}.weight": size for key, size in in_layer.items()}
    assert {key: tensor["shape"] for key, tensor in header.items()} == expected
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    num_bytes = sum(2 * math.prod(size) for size in expected.values())
    assert max(tensor["data_offsets"][1] for tensor in header.values()) == num_bytes


def test_both_models_share_one_tokenizer() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (MODELS / "demo" / file).read_bytes() == (MODELS / "demo-draft" / file).read_bytes()


def test_end_of_text_is_the_eos_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 4096
    assert tokenizer.token_to_id(END) == read_json("demo", "config.json")["eos_token_id"]
    assert read_json("demo", "tokenizer_config.json")["eos_token"] == END
    assert tokenizer.encode("x").tokens == ["x"]  # no token is added at either end


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x\n",
        "\n\n\n \t  leading, trailing \t \n ",
        "a\r\nb\rc\x00\x7f\x1b",
        "na\u00efve \u6f22\u5b57 \U0001f642\U0001f469\u200d\U0001f4bb e\u0301 \u05e9\u05dc",
        " .join ,( ['",
        "".join(chr(point) for point in range(0x1_0000) if not 0xD800 <= point < 0xE000),
    ],
    ids=["code", "spaces", "controls", "unicode", "punctuation", "every-character"],
)
def test_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_byte_of_utf8_has_a_token(tokenizer: Tokenizer) -> None:
    """As in GPT-2, bytes are spelled as printable characters; visible ones stand for themselves."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    spelling = [chr(byte) for byte in visible] + [chr(256 + n) for n in range(len(hidden))]
    assert all(tokenizer.token_to_id(char) is not None for char in spelling)


def test_a_prompt_may_end_after_a_newline_or_an_indent(tokenizer: Tokenizer) -> None:
    """A text cut there has the same tokens as the whole, so a prompt looks like training text."""
    text = "class A:\n    def f(self):\n        return 1\n"
    whole = tokenizer.encode(text).ids
    for end in (text.index("\n") + 1, text.index("def"), text.index("return")):
        parts = tokenizer.encode(text[:end]).ids + tokenizer.encode(text[end:]).ids
        assert parts == whole
