"""adapter_config.json as PEFT writes it: which settings are served, and which are rejected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import AdapterRefused, StartupFailed
from ...core.model_dir import read_json
from .layout import TARGETS

FILE = "adapter_config.json"

# Fields that change the results, with the values at which they do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "megatron_config": (None,),
}


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The settings of an adapter. `scaling`: the factor of the product B A."""

    rank: int
    scaling: float


def read_lora_config(folder: Path, max_rank: int) -> LoraConfig:
    """Read and check adapter_config.json. Raises AdapterRefused, naming the file and the field."""
    path = folder / FILE
    try:
        fields = read_json(path)
    except StartupFailed as error:
        raise AdapterRefused(error.message) from error

    def refuse(name: str, why: str) -> AdapterRefused:
        return AdapterRefused(f"{path}: {name} {why}")

    if fields.get("peft_type") != "LORA":
        raise refuse("peft_type", f"is {_shown(fields.get('peft_type'))}, only LORA is supported")
    for name, plain in _PLAIN.items():
        if fields.get(name) not in plain:
            raise refuse(name, f"is {_shown(fields[name])}, which is not supported")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise refuse("r", f"is {_shown(rank)}, and must be an integer above 0")
    if rank > max_rank:
        raise refuse("r", f"is {rank}, more than --max-lora-rank {max_rank}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise refuse("lora_alpha", f"is {_shown(alpha)}, and must be a number above 0")
    if type(is_rs := fields.get("use_rslora") or False) is not bool:
        raise refuse("use_rslora", f"is {_shown(is_rs)}, and must be true or false")
    _check_targets(fields.get("target_modules"), refuse)
    return LoraConfig(rank, float(alpha) / (math.sqrt(rank) if is_rs else rank))


def _check_targets(targets: object, refuse: Any) -> None:
    """Check that a list has only supported names; a pattern is checked by the tensors."""
    if isinstance(targets, str):
        return
    if not isinstance(targets, list) or not targets:
        raise refuse("target_modules", "must be a list of names")
    for name in targets:
        if not isinstance(name, str) or name.rpartition(".")[2] not in TARGETS:
            raise refuse("target_modules", f"has {_shown(name)}; served are {', '.join(TARGETS)}")


def _shown(value: object) -> str:
    return repr(value)[:64]
