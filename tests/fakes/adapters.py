"""Random LoRA adapters in PEFT's format, and checkpoints with merged adapters as the oracle."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    base: Path,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    targets: tuple[str, ...] = DENSE,
    std: float = 0.15,
    change: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    **fields: Any,
) -> Path:
    """Write a random adapter for the checkpoint `base`; `change` and `fields` introduce errors."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets or ".experts." in name or weight.dim() != 2:
            continue
        outputs, inputs = weight.shape
        halves = {"A": (rank, inputs), "B": (outputs, rank)}
        for half, shape in halves.items():
            drawn = torch.randn(shape, generator=generator) * std
            tensors[f"{PREFIX}{module}.lora_{half}.weight"] = drawn
    change(tensors)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


def merge(folder: Path, base: Path, adapter: Path) -> Path:
    """Write the checkpoint `base` with the adapter merged into its weights."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    root = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
    weights, halves = load_file(base / "model.safetensors"), _halves(adapter)
    for module, (a, b) in halves.items():
        name = f"{module}.weight"
        weights[name] = (
            weights[name].double() + config["lora_alpha"] / root * (b.double() @ a.double())
        ).float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _halves(adapter: Path) -> Mapping[str, tuple[Tensor, Tensor]]:
    tensors = load_file(adapter / "adapter_model.safetensors")
    modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
    return {
        module: (
            tensors[f"{PREFIX}{module}.lora_A.weight"],
            tensors[f"{PREFIX}{module}.lora_B.weight"],
        )
        for module in modules
    }
