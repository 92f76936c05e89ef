"""Tiny checkpoints in int4, in each format that Baton reads.

Each comes with the same model in transformers with the dequantised weights, in float32. Independent
of the code under test: values are chosen and packed here one by one, like the formats' own tools do
(AutoGPTQ, AutoAWQ, compressed-tensors).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import Written, weight_of, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _gptq(group_size: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "desc_act": False,
        "sym": True,
        "damp_percent": 0.1,
        "true_sequential": True,
        "lm_head": False,
        **more,
    }


def _awq(group_size: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
        **more,
    }


def _compressed(group_size: int, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "dynamic": False,
        "actorder": None,
    }
    group = {"targets": ["Linear"], "weights": weights | more, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
    }


@dataclass(frozen=True)
class Format:
    """The quantisation config, and how values are chosen."""

    config: dict[str, Any]
    group_size: int
    is_symmetric: bool = True
    scale_dtype: torch.dtype = torch.float16
    has_head: bool = False

    @property
    def method(self) -> str:
        return str(self.config["quant_method"])


_BF16 = torch.bfloat16
FORMATS = {
    "gptq": Format(_gptq(128), 128),
    "gptq, zeros": Format(_gptq(128, sym=False), 128, is_symmetric=False),
    "gptq v2, groups of 32": Format(
        _gptq(32, sym=False, checkpoint_format="gptq_v2"), 32, is_symmetric=False
    ),
    "gptq, groups of 64, its head": Format(
        *(_gptq(64, lm_head=True, sym=False), 64),
        is_symmetric=False,
        scale_dtype=_BF16,
        has_head=True,
    ),
    "gptq, channel": Format(_gptq(-1), -1),
    "awq": Format(_awq(128), 128, is_symmetric=False),
    "awq, groups of 32": Format(_awq(32), 32, is_symmetric=False),
    "compressed": Format(_compressed(128), 128, scale_dtype=_BF16),
    "compressed, zeros": Format(
        _compressed(32, symmetric=False), 32, is_symmetric=False, scale_dtype=_BF16
    ),
    "compressed, channel": Format(_compressed(-1), -1, scale_dtype=torch.float32),
}


@dataclass
class Numbers:
    """values [outputs, inputs] and zeros [outputs, groups] from 0 on, scales [outputs, groups]."""

    numbers: Tensor
    scale: Tensor
    zero: Tensor

    @property
    def meant(self) -> Tensor:
        """The dequantised weight, in float32."""
        size = self.numbers.shape[1] // self.scale.shape[1]
        zero, scale = (one.float().repeat_interleave(size, 1) for one in (self.zero, self.scale))
        return (self.numbers - zero) * scale


def quantised(weight: Tensor, form: Format) -> Numbers:
    """The nearest int4 values."""
    outputs, inputs = weight.shape
    size = inputs if form.group_size == -1 else form.group_size
    grouped = weight.float().reshape(outputs, inputs // size, size)
    if form.is_symmetric:
        scale = grouped.abs().amax(2) / 7
        zero = torch.full_like(scale, 8)
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scale = (high - low) / 15
        zero = (-low / scale).round()
    scale = scale.to(form.scale_dtype)
    numbers = (grouped / scale.float()[:, :, None]).round() + zero[:, :, None]
    return Numbers(numbers.clamp(0, 15).int().reshape(outputs, inputs), scale, zero.int())


def packed(values: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight values along `dim` per word: its n-th four bits are value order[n] of the eight."""
    columns = values.movedim(dim, -1).long()
    columns = torch.nn.functional.pad(columns, (0, -columns.shape[-1] % 8))
    words = torch.zeros_like(columns[..., ::8])
    for place, which in enumerate(order):
        words |= columns[..., which::8] << 4 * place
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return signed.int().movedim(-1, dim).contiguous()


def tensors_of(made: Numbers, form: Format) -> dict[str, Tensor]:
    """A weight's tensors in the file, by suffix."""
    outputs, inputs = made.numbers.shape
    groups = made.scale.shape[1]
    numbers, scale, zero = made.numbers.t(), made.scale.t().contiguous(), made.zero.t()
    if form.method == "gptq":
        is_old = int(form.config.get("checkpoint_format", "gptq") == "gptq")
        # Zeros of 0 become 15, as in AutoGPTQ: no tool makes weights with such zeros.
        return {
            "qweight": packed(numbers, 0),
            "qzeros": packed((zero - is_old) % 16, 1),
            "scales": scale,
            "g_idx": (torch.arange(inputs) // (inputs // groups)).int(),
        }
    if form.method == "awq":
        return {
            "qweight": packed(numbers, 1, _AWQ_ORDER),
            "qzeros": packed(zero, 1, _AWQ_ORDER),
            "scales": scale,
        }
    found = {
        "weight_packed": packed(made.numbers, 1),
        "weight_scale": made.scale.contiguous(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not form.is_symmetric:
        found["weight_zero_point"] = packed(made.zero, 0)
    return found


def write_int4_checkpoint(folder: Path, name: str, **settings: Any) -> PreTrainedModel:
    """Write the checkpoint in the format `name`; returns the model with its dequantised weights."""
    return _written.again(folder, name, **settings)


def _write(folder: Path, name: str, *, is_sharded: bool = False, **changes: Any) -> PreTrainedModel:
    form = FORMATS[name]
    model = write_checkpoint(folder, **changes)
    file = folder / "model.safetensors"
    plain, made, meant = load_file(file), dict[str, Tensor](), dict[str, Tensor]()
    for key in list(plain):
        is_projection = ".layers." in key and plain[key].ndim == 2 and ".gate.weight" not in key
        if is_projection or (key == "lm_head.weight" and form.has_head):
            numbers = quantised(plain.pop(key), form)
            if form.method == "gptq":  # the older format cannot store a zero of 0
                numbers.zero.clamp_(min=1 if "v2" not in name else 0)
            meant[key] = numbers.meant
            module = key.removesuffix(".weight")
            found = tensors_of(numbers, form)
            made |= {f"{module}.{suffix}": tensor for suffix, tensor in found.items()}
    if is_sharded:
        file.unlink()
        scales = {key: made.pop(key) for key in list(made) if "scale" in key or "zero" in key}
        parts = {"model-1.safetensors": scales, "model-2.safetensors": plain | made}
        weight_map = {key: part for part, of_part in parts.items() for key in of_part}
        for part, of_part in parts.items():
            save_file(of_part, folder / part)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(plain | made, file)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"quantization_config": form.config}
    (folder / "config.json").write_text(json.dumps(settings))
    known = model.state_dict()
    for key, weight in meant.items():
        weight_of(known, key).copy_(weight)
    return model


_written = Written(_write)
