"""Tiny checkpoints in FP8, in each format that Baton reads.

Each comes with the same model in transformers with the dequantised weights, in float32. Independent
of the code under test: scales and numbers are computed here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import Written, weight_of, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

FP8 = torch.float8_e4m3fn
_DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def _compressed(strategy: str, activations: dict[str, Any], **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    group = {"targets": ["Linear"], "weights": weights | more, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
    }


# The quantisation config by name, and the layout of scales: what each covers, and its suffix.
FORMATS: dict[str, tuple[dict[str, Any], str, str]] = {
    "block": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "mlp.gate"],
        },
        "block",
        "weight_scale_inv",
    ),
    "tensor, static activations": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["mlp.gate"]},
        "tensor",
        "weight_scale",
    ),
    "compressed, channel": (_compressed("channel", _DYNAMIC), "channel", "weight_scale"),
    "compressed, tensor": (_compressed("tensor", _STATIC), "tensor", "weight_scale"),
    "compressed, block": (
        _compressed("block", _DYNAMIC, block_structure=[128, 128]),
        "block",
        "weight_scale",
    ),
    "compressed, with its head": (
        _compressed("channel", _DYNAMIC) | {"ignore": ["re:.*mlp.gate$"]},
        "channel",
        "weight_scale",
    ),
}
_LARGEST = 448.0


def quantised(weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3, the scales as stored in the file, the dequantised weight in float32)."""
    outputs, inputs = weight.shape
    if kind == "channel":
        scale = weight.abs().amax(1, keepdim=True) / _LARGEST
        each = scale.expand(outputs, inputs)
    elif kind == "tensor":
        scale = weight.abs().max() / _LARGEST
        each = scale.expand(outputs, inputs)
    else:
        scale = torch.empty(-(-outputs // 128), -(-inputs // 128))
        each = torch.empty(outputs, inputs)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                scale[i, j] = weight[block].abs().max() / _LARGEST
                each[block] = scale[i, j]
    data = (weight / each).to(FP8)
    return data, scale, data.float() * each


def write_fp8_checkpoint(folder: Path, name: str, **settings: Any) -> PreTrainedModel:
    """Write the checkpoint in the format `name`; returns the model with its dequantised weights."""
    return _written.again(folder, name, **settings)


def _write(folder: Path, name: str, *, is_sharded: bool = False, **changes: Any) -> PreTrainedModel:
    config, kind, suffix = FORMATS[name]
    model = write_checkpoint(folder, **changes)
    file = folder / "model.safetensors"
    tensors, scales, meant = load_file(file), {}, {}
    has_head = name == "compressed, with its head"
    for key in list(tensors):
        is_head = key == "lm_head.weight"
        is_projection = ".layers." in key and tensors[key].ndim == 2 and ".gate.weight" not in key
        if is_projection or (is_head and has_head):
            module = key.removesuffix(".weight")
            tensors[key], scale, meant[key] = quantised(tensors[key].float(), kind)
            scales[f"{module}.{suffix}"] = scale.contiguous()
            if "static" in name or "tensor" in name:
                scales[f"{module}.input_scale"] = torch.tensor([0.5])
    if is_sharded:
        file.unlink()
        parts = {"model-1.safetensors": scales, "model-2.safetensors": tensors}
        weight_map = {key: part for part, of_part in parts.items() for key in of_part}
        for part, of_part in parts.items():
            save_file(of_part, folder / part)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors | scales, file)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    known = model.state_dict()
    for key, weight in meant.items():
        weight_of(known, key).copy_(weight)
    return model


_written = Written(_write)
