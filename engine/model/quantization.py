"""How a checkpoint's weights are quantised: `quantization_config` of config.json, checked once.

    quant_method          scales                              what stays as it is
    fp8                   128 x 128, weight_block_size        modules_to_not_convert, ignored_layers
    fp8                   one a tensor                        the same
    compressed-tensors    channel, tensor or block            ignore

Standard library only. What is not e4m3 with such scales is rejected by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .config_fields import Fields

FP8_KERNELS = "BATON_FP8_KERNELS"  # in the environment
BLOCK = 128
TENSOR_SCALED, ROW_SCALED, BLOCK_SCALED = "tensor", "row", "block"
_STRATEGIES = {"tensor": TENSOR_SCALED, "channel": ROW_SCALED, "block": BLOCK_SCALED}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which projections have weights in FP8, and how their scales lie in the checkpoint."""

    scaling: str  # TENSOR_SCALED, ROW_SCALED or BLOCK_SCALED
    scale_suffix: str | None  # behind a projection's name; None: quantised as it is loaded
    unconverted: tuple[str, ...] = ()  # names, parts of names between dots, and re: patterns
    has_input_scales: bool = False  # in the checkpoint; activations are scaled by themselves here

    def covers(self, name: str) -> bool:
        """Whether the projection `name` is quantised."""
        return not any(_matches(entry, name) for entry in self.unconverted)

    def scale_of(self, name: str) -> str | None:
        """The checkpoint's tensor with the scales of projection `name`."""
        return None if self.scale_suffix is None else name + self.scale_suffix

    def ignored(self, names: Iterable[str]) -> frozenset[str]:
        """Tensors of these projections that may be in the checkpoint and are not read."""
        return frozenset(f"{name}.input_scale" for name in names if self.has_input_scales)

    @property
    def name(self) -> str:
        """For people."""
        return f"FP8 weights, a scale for each {self.scaling}"


def stays_fp8() -> bool:
    """Whether GPUs are to multiply in FP8: their kernels have not passed their tests there yet."""
    return os.environ.get(FP8_KERNELS, "") == "1"


# What --quantization asks for.
_NEVER = ("lm_head", "mlp.gate", "block_sparse_moe.gate", "shared_expert_gate")
AT_LOAD = {"fp8": Quantization(ROW_SCALED, None, _NEVER)}


def _matches(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return f".{entry}." in f".{name}."


def read_quantization(fields: Fields) -> Quantization | None:
    """None for a checkpoint of plain floats; `fields` are config.json's."""
    section = fields.section("quantization_config")
    if not section:
        return None
    method = section.get("quant_method")
    if method == "fp8":
        found = _read_fp8(section)
    elif method == "compressed-tensors":
        found = _read_compressed(section)
    else:
        raise section.error(
            f"quantization_config: quant_method {method!r} is not supported",
            hint="FP8 checkpoints are: quant_method fp8 and compressed-tensors",
        )
    for entry in found.unconverted:
        try:
            _matches(entry, "")
        except re.error as error:
            raise section.error(f"quantization_config: {entry!r} is no pattern: {error}") from error
    return found


def _read_fp8(section: Fields) -> Quantization:
    kind = section.get("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise section.error(f"quantization_config: fmt {kind!r} is not supported, only e4m3")
    has_input_scales = _one_of(section, "activation_scheme", ("dynamic", "static")) == "static"
    unconverted = (
        "lm_head",  # by convention, named or not
        *_strings(section, "modules_to_not_convert"),
        *_strings(section, "ignored_layers"),
    )
    block = section.get("weight_block_size")
    if block is None:
        return Quantization(TENSOR_SCALED, ".weight_scale", unconverted, has_input_scales)
    _check_block(section, "weight_block_size", block)
    return Quantization(BLOCK_SCALED, ".weight_scale_inv", unconverted, has_input_scales)


def _read_compressed(section: Fields) -> Quantization:
    _one_of(section, "format", ("float-quantized",))
    if section.get("kv_cache_scheme") is not None:
        raise section.error("quantization_config: kv_cache_scheme is not supported")
    groups = section.section("config_groups")
    names = groups.names()
    if len(names) != 1:
        raise section.error(f"quantization_config: {len(names)} config_groups, only 1 is supported")
    group = groups.section(names[0])
    if _strings(group, "targets") != ("Linear",):
        raise section.error("quantization_config: targets other than Linear are not supported")
    weights, inputs = group.section("weights"), group.section("input_activations")
    for part in (weights, inputs):
        if part and (part.get("num_bits"), part.get("type")) != (8, "float"):
            raise section.error("quantization_config: only floats of 8 bits are supported")
    strategy = _one_of(weights, "strategy", tuple(_STRATEGIES))
    if strategy == "block":
        _check_block(section, "block_structure", weights.get("block_structure"))
    return Quantization(
        scaling=_STRATEGIES[strategy],
        scale_suffix=".weight_scale",
        unconverted=_strings(section, "ignore"),
        has_input_scales=bool(inputs) and not inputs.flag("dynamic"),
    )


def _one_of(section: Fields, name: str, supported: tuple[str, ...]) -> str:
    value = section.get(name, supported[0])
    if value not in supported:
        raise section.error(
            f"quantization_config: {name} {value!r} is not supported",
            hint=f"supported are: {', '.join(supported)}",
        )
    return str(value)


def _check_block(section: Fields, name: str, value: object) -> None:
    if value != [BLOCK, BLOCK]:
        raise section.error(
            f"quantization_config: {name} {value!r} is not supported, only [{BLOCK}, {BLOCK}]"
        )


def _strings(section: Fields, name: str) -> tuple[str, ...]:
    value = section.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise section.error(f"quantization_config: {name} is no list of names")
    return tuple(value)
