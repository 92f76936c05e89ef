"""How a checkpoint's weights are quantised: `quantization_config` of config.json, checked once.

    quant_method          one scale for each                  field with unquantised modules
    fp8                   128 x 128, weight_block_size        modules_to_not_convert, ignored_layers
    fp8                   tensor                              the same
    compressed-tensors    channel, tensor or block            ignore
    gptq, awq             group of inputs, or channel         modules_to_not_convert
    compressed-tensors    group of inputs, or channel         ignore

The first three are e4m3, the others four bits. All else is rejected by name. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .config_fields import Fields
from .weights.int4_layout import Int4

BLOCK = 128
TENSOR_SCALED, ROW_SCALED, BLOCK_SCALED, GROUP_SCALED = "tensor", "row", "block", "group"
_STRATEGIES = {"tensor": TENSOR_SCALED, "channel": ROW_SCALED, "block": BLOCK_SCALED}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which projections have weights in FP8 or int4, and how the checkpoint stores their scales."""

    scaling: str  # TENSOR_SCALED, ROW_SCALED or BLOCK_SCALED; int4: GROUP_SCALED
    scale_suffix: str | None  # after a projection's name; None: quantise while loading
    unconverted: tuple[str, ...] = ()  # names, parts of names between dots, and "re:" patterns
    has_input_scales: bool = False  # in the checkpoint, unused: activations are scaled dynamically
    int4: Int4 | None = None

    def covers(self, name: str) -> bool:
        """Whether the projection `name` is quantised."""
        return not any(_matches(entry, name) for entry in self.unconverted)

    def scale_of(self, name: str) -> str | None:
        """The name of the checkpoint's tensor with the scales of projection `name`."""
        return None if self.scale_suffix is None else name + self.scale_suffix

    def ignored(self, names: Iterable[str]) -> frozenset[str]:
        """Tensors of these projections that the checkpoint may have and that are not read."""
        return frozenset(f"{name}.input_scale" for name in names if self.has_input_scales)

    @property
    def bytes_per_weight(self) -> float:
        """In memory, if weights stay quantised; for int4 including scales."""
        return 1 if self.int4 is None else 0.5 + 4 / (self.int4.group_size or BLOCK)

    @property
    def name(self) -> str:
        """A description for people."""
        if self.int4 is not None:
            size = self.int4.group_size
            return "int4 weights, a scale for each " + (f"{size} inputs" if size else "output")
        return f"FP8 weights, a scale for each {self.scaling}"


def stays_packed(quantization: Quantization | None, dtype: str) -> bool:
    """Whether GPUs compute with the quantised weights, without dequantising them, in `dtype`."""
    if quantization is None:
        return False
    if quantization.int4 is not None:
        return dtype in ("bfloat16", "float16")
    return dtype == "bfloat16"


def experts_stay_packed(hidden: int, inner: int) -> bool:
    """Whether GPUs compute with int4 experts of these sizes on one rank without dequantising them:
    the inputs of both matrices must be multiples of the kernels' chunks."""
    return not (hidden % BLOCK or inner % BLOCK)


# The values of --quantization.
_ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "shared_expert_gate")
_NEVER = ("lm_head", *_ROUTERS)
AT_LOAD = {
    "fp8": Quantization(ROW_SCALED, None, _NEVER),
    "int4": Quantization(GROUP_SCALED, None, _NEVER, int4=Int4(BLOCK)),
}
_GROUP_SIZES = (128, 64, 32, -1)
_CHANNEL = -1  # a group of all inputs


def _matches(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return f".{entry}." in f".{name}."


def read_quantization(fields: Fields) -> Quantization | None:
    """The quantization in config.json, `fields`; None for a checkpoint of plain floats."""
    section = fields.section("quantization_config")
    if not section:
        return None
    method = section.get("quant_method")
    if method == "fp8":
        found = _read_fp8(section)
    elif method == "compressed-tensors":
        found = _read_compressed(section)
    elif method == "gptq":
        found = _read_gptq(section)
    elif method == "awq":
        found = _read_awq(section)
    else:
        raise section.error(
            f"quantization_config: quant_method {method!r} is not supported",
            hint="supported are: fp8, compressed-tensors, gptq, awq",
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
        "lm_head",  # by convention, whether listed or not
        *_strings(section, "modules_to_not_convert"),
        *_strings(section, "ignored_layers"),
    )
    block = section.get("weight_block_size")
    if block is None:
        return Quantization(TENSOR_SCALED, ".weight_scale", unconverted, has_input_scales)
    _check_block(section, "weight_block_size", block)
    return Quantization(BLOCK_SCALED, ".weight_scale_inv", unconverted, has_input_scales)


def _read_gptq(section: Fields) -> Quantization:
    group_size = _group_size(section)
    version = _one_of(section, "checkpoint_format", ("gptq", "gptq_v2"))
    for name in ("dynamic", "modules_in_block_to_quantize"):
        if section.get(name):
            raise section.error(f"quantization_config: {name} is not supported")
    unconverted = _ROUTERS if section.flag("lm_head") else ("lm_head", *_ROUTERS)
    int4 = Int4(
        group_size,
        "gptq",
        has_zeros=True,
        zero_offset=1 if version == "gptq" else 0,
        is_ordered=section.flag("desc_act"),
    )
    return _in_int4(int4, (*unconverted, *_strings(section, "modules_to_not_convert")))


def _read_awq(section: Fields) -> Quantization:
    group_size = _group_size(section)
    if str(section.get("version", "gemm")).lower() != "gemm":
        raise section.error(
            f"quantization_config: version {section.get('version')!r} is not supported",
            hint="supported are: gemm",
        )
    if not section.flag("zero_point", True):
        raise section.error("quantization_config: zero_point false is not supported")
    unconverted = ("lm_head", *_ROUTERS, *_strings(section, "modules_to_not_convert"))
    return _in_int4(Int4(group_size, "awq", has_zeros=True), unconverted)


def _in_int4(int4: Int4, unconverted: tuple[str, ...]) -> Quantization:
    return Quantization(GROUP_SCALED, int4.layout.scales.suffix, unconverted, int4=int4)


def _group_size(section: Fields) -> int | None:
    """The group size of four-bit weights; None if all inputs of an output share a scale."""
    if section.get("bits") != 4:
        raise section.error(
            f"quantization_config: bits {section.get('bits')!r} is not supported, only 4"
        )
    return _checked_group_size(section, section.get("group_size", _GROUP_SIZES[0]))


def _checked_group_size(section: Fields, size: object) -> int | None:
    if isinstance(size, bool) or size not in _GROUP_SIZES:
        raise section.error(
            f"quantization_config: group_size {size!r} is not supported",
            hint=f"supported are: {', '.join(map(str, _GROUP_SIZES))}",
        )
    return None if size == _CHANNEL else int(str(size))


def _read_compressed(section: Fields) -> Quantization:
    form = _one_of(section, "format", ("float-quantized", "pack-quantized"))
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
    if form == "pack-quantized":
        return _read_packed(section, weights, inputs)
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


def _read_packed(section: Fields, weights: Fields, inputs: Fields) -> Quantization:
    if (weights.get("num_bits"), weights.get("type")) != (4, "int"):
        raise section.error("quantization_config: only integers of 4 bits are packed")
    if inputs:
        raise section.error("quantization_config: input_activations with int4 are not supported")
    is_whole = _one_of(weights, "strategy", ("group", "channel")) == "channel"
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static", "group", True):
        raise section.error(f"quantization_config: actorder {order!r} is not supported")
    int4 = Int4(
        None if is_whole else _checked_group_size(section, weights.get("group_size")),
        "compressed",
        has_zeros=not weights.flag("symmetric", True),
        is_ordered=order in ("group", True),
    )
    return _in_int4(int4, _strings(section, "ignore"))


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
