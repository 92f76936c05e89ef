"""The models of the GPU figures, by shape alone, and the floors that follow from the shapes.

    decode step   = max(bytes / bandwidth, operations / rate)
    prefill       = max(bytes / bandwidth, operations / rate)

bytes: all weights except the input embedding once, of experts those that uniform routing activates,
and for a decode the KV of all positions; a prefill computes the LM head for the last position of
each prompt only. operations: 2 per weight and token, and 4 per head, dimension and query-key pair.
Bandwidth and rate were measured with a large copy and a large GEMM, not taken from the data sheet.
Weights in FP8 are a byte each, without scales; in int4 half a byte with their scales. The LM head
is not quantised: its GEMM is in bf16, as are all GEMMs with weights in int4.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

BYTES_PER_S = 4.3e12  # of an H200
_BYTES_PER_S_OF = {"H100": 3.0e12}
FLOPS = 790e12  # of H100 and H200
FP8_FLOPS, FP8_BLOCK_FLOPS = 1400e12, 1100e12  # with row-wise scales, with block-wise scales
LINK_BYTES_PER_S = 450e9  # NVLink of one GPU, each way
_BF16 = 2
_INT4 = 0.5 + 4 / 128
_SCALE = 4  # bytes per token, head and K or V, in addition to one byte per value
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def bytes_per_s(card: str) -> float:
    """The memory bandwidth of a card by its name; that of an H200 if the card is unknown."""
    return next((rate for name, rate in _BYTES_PER_S_OF.items() if name in card), BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Llama-like model, as in its config.json."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    is_tied: bool = False
    has_qk_norm: bool = False  # as in Qwen3; else Llama's architecture
    is_kv_8bit: bool = False
    # fp8: row-wise scales; fp8-block: block-wise, as in a checkpoint; int4: groups of 128
    quantization: str | None = None
    experts: int = 0  # as in Qwen3-MoE, each of size `inner`; 0: one MLP
    chosen: int = 0  # experts per token
    bytes_per_s: float = BYTES_PER_S  # memory bandwidth of the card

    def touched(self, num_tokens: int) -> float:
        """The expected number of experts per layer that `num_tokens` tokens choose, with uniform
        routing."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** num_tokens)

    def _layer_weights(self, num_mlps: float) -> float:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        router = self.hidden * self.experts
        return self.layers * (attention + router + 3 * self.hidden * self.inner * num_mlps)

    def layer_weights_read(self, num_tokens: int) -> float:
        """The layer weights that a step of `num_tokens` tokens reads."""
        return self._layer_weights(self.touched(num_tokens) if self.experts else 1)

    @property
    def layer_weights(self) -> float:
        """The layer weights that one token is multiplied with."""
        return self._layer_weights(self.chosen if self.experts else 1)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        head_bytes = self.head_dim + _SCALE if self.is_kv_8bit else self.head_dim * _BF16
        return 2 * self.layers * self.kv_heads * head_bytes

    @property
    def kind(self) -> str:
        """The model type of transformers."""
        if self.experts:
            return "qwen3_moe"
        return "qwen3" if self.has_qk_norm else "llama"

    @property
    def _weight_bytes(self) -> float:
        """Bytes of one layer weight."""
        if self.quantization == "int4":
            return _INT4
        return 1 if self.quantization else _BF16

    @property
    def _layer_flops(self) -> float:
        """Peak operations per second of GEMMs in layers."""
        rates = {"fp8": FP8_FLOPS, "fp8-block": FP8_BLOCK_FLOPS}
        return rates.get(self.quantization or "", FLOPS)

    def part(self, count: int) -> Shape:
        """The part of one of `count` ranks, as a model of its own that fewer GPUs can run."""
        return replace(
            self,
            name=self.name if count == 1 else f"{self.name}/{count}",
            heads=self.heads // count,
            kv_heads=max(1, self.kv_heads // count),
            inner=self.inner // count,
            vocab=self.vocab // count,
        )

    def decode_floor_ms(self, batch: int, context: int) -> float:
        """One step of `batch` sequences with a context of `context` tokens each."""
        head_bytes = self.head_weights * _BF16
        read_bytes = self.layer_weights_read(batch) * self._weight_bytes + head_bytes
        num_bytes = read_bytes + batch * context * self.kv_bytes_per_token
        attention = 4 * self.layers * self.heads * self.head_dim * context * batch
        # GEMMs are bound by operations or by reading weights, attention by reading KV.
        products_s = max(
            2 * self.layer_weights * batch / self._layer_flops
            + 2 * self.head_weights * batch / FLOPS,
            read_bytes / self.bytes_per_s,
        )
        reading_s = batch * context * self.kv_bytes_per_token / self.bytes_per_s
        parts_s = products_s + max(reading_s, attention / FLOPS)
        return max(parts_s, num_bytes / self.bytes_per_s) * 1e3

    def prefill_floor_ms(self, num_prompts: int, num_tokens: int) -> float:
        """`num_prompts` prompts of `num_tokens` tokens each."""
        products_s = 2 * self.layer_weights * num_tokens / self._layer_flops
        products_s += 2 * self.head_weights / FLOPS
        pairs = num_tokens * (num_tokens + 1) / 2
        attention = 4 * self.layers * self.heads * self.head_dim * pairs
        read = self.layer_weights_read(num_prompts * num_tokens) * self._weight_bytes
        reading_s = (read + self.head_weights * _BF16) / self.bytes_per_s
        return max(num_prompts * (products_s + attention / FLOPS), reading_s) * 1e3

    def sums_floor_ms(self, num_tokens: int, num_gpus: int) -> float:
        """The all-reduces after attention and MLP of every layer: bytes over the links."""
        num_bytes = 2 * self.layers * num_tokens * self.hidden * _BF16
        return num_bytes * 2 * (num_gpus - 1) / num_gpus / LINK_BYTES_PER_S * 1e3

    def write_config(self, folder: Path) -> Path:
        """Create a model directory with only a config.json, for `--load-format dummy`."""
        config = {
            "architectures": [_ARCHITECTURES[self.kind]],
            "model_type": self.kind,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": "bfloat16",
            "eos_token_id": 2,
        }
        if self.experts:
            config |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.chosen,
                "moe_intermediate_size": self.inner,
                "norm_topk_prob": True,
            }
        if self.quantization == "fp8-block":
            config["quantization_config"] = {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["mlp.gate"],
            }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14_336, 128_256),
        Shape("qwen3-8b", 36, 4096, 32, 8, 128, 12_288, 151_936, has_qk_norm=True),
        Shape(
            *("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151_936),
            has_qk_norm=True,
            experts=128,
            chosen=8,
        ),
        Shape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28_672, 128_256),
        Shape(*("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151_936), is_tied=True, has_qk_norm=True),
        # Llama's first models, as used in papers: multi-head attention without grouped KV heads.
        Shape("llama-7b", 32, 4096, 32, 32, 128, 11_008, 32_000),
        Shape("llama-13b", 40, 5120, 40, 40, 128, 13_824, 32_000),
        Shape("llama-65b", 80, 8192, 64, 64, 128, 22_016, 32_000),
        Shape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8_192, 128_256, is_tied=True),
    )
}
