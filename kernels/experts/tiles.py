"""Tilings of the products of a mixture of experts, by its sizes and the tokens of a step.

    few         a program has some outputs of one (token, expert) pair, without tensor cores
    tiles       a program has some outputs of a tile of rows of one expert
    persistent  a program goes from tile to tile

tiles.json has the fastest plans, and the card they were measured on; it is written by
`python -m baton.bench.kernels.experts`. Other mixtures get a default by their rows per expert.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WIDE_ROWS = 128  # of a tile that two warp groups share
TABLE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True, slots=True)
class Cut:
    """Tiling of one of the two products of `Tiles`: outputs of a program, inputs of a step, steps
    in flight (`stages`); `group`: number of consecutive tiles with the same outputs.

    With int4 weights `outputs` counts rows of the weight, for a gated product twice its outputs; a
    step has 128 inputs, and the product is always transposed.
    """

    outputs: int
    inputs: int
    stages: int
    warps: int
    group: int = 1
    is_turned: bool = False  # transposed: outputs are the MMA's rows, which fills its tiles
    has_descriptor: bool = False  # weights are loaded by TMA


@dataclass(frozen=True, slots=True)
class Few:
    """Outputs of a program in the two products, and inputs of a step of the gated product."""

    gated: int
    down: int
    warps: int = 4
    inputs: int = 2048


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of a tile, and the two products over them.

    `has_fp8_rows`: weights in FP8 are multiplied with activations in FP8. A program of the gated
    product then has 128 outputs, which get one scale.
    """

    rows: int
    gated: Cut
    down: Cut
    has_fp8_rows: bool = False


@dataclass(frozen=True, slots=True)
class Persistent:
    """Rows of a tile, and steps of 128 bytes of inputs in flight in the two products.

    16 or 32 rows: for weights and activations in FP8, with sizes that are multiples of 128. 128
    rows: also for floats; outputs of the down product are a multiple of 256. Up to `group`
    consecutive tiles have the same outputs.
    """

    rows: int
    gated: int
    down: int
    has_fp8_rows: bool = True
    group: int = 4

    @property
    def is_wide(self) -> bool:
        return self.rows == WIDE_ROWS

    @property
    def tiles(self) -> Tiles:
        """The plan with the same rows, for devices without the Gluon kernels."""
        cut = _TURNED
        if self.is_wide:
            cut = Cut(128, 128 if self.has_fp8_rows else 64, 3, 8, self.group)
        return Tiles(self.rows, cut, cut, self.has_fp8_rows)


Plan = Few | Tiles | Persistent


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one rank's part of a mixture."""

    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    weights: str = ""  # fp8: a scale for each output; fp8-block: for 128 x 128; int4; else floats
    num_ranks: int = 1  # that share the experts, each with such a part

    @property
    def is_whole(self) -> bool:
        """Whether persistent programs support these sizes."""
        return self.hidden % 256 == 0 and self.inner % 128 == 0 and self.weights != "int4"

    @property
    def key(self) -> str:
        key = f"{self.num_experts} experts, {self.num_chosen} chosen, {self.hidden} x {self.inner}"
        if self.num_ranks > 1:
            key = f"of {self.num_ranks} ranks, {key}"
        return f"{key}, {self.weights}" if self.weights else key


def choose_plan(sizes: Sizes, num_tokens: int, itemsize: int, *, has_programs: bool = True) -> Plan:
    """The fastest plan for `num_tokens` tokens with numbers of `itemsize` bytes.

    `has_programs`: persistent programs run on this device. The other kernels use wide tiles only
    for many rows per expert, since they multiply padding rows too.
    """
    if itemsize != 2:
        return _EXACT
    if (steps := _table().get(sizes.key)) is not None:
        plan = _first(steps, num_tokens)
        if has_programs or not (isinstance(plan, Persistent) and plan.is_wide):
            return plan
    steps = {"": _DEFAULTS, "int4": _INT4_DEFAULTS}.get(sizes.weights, _FP8_DEFAULTS)
    # The number of tokens that gives 128 experts with 8 choices as many rows per expert.
    num_experts = sizes.num_experts * sizes.num_ranks
    num_tokens = max(1, num_tokens * sizes.num_chosen * 16 // num_experts)
    if num_tokens > _MOST_NARROW[has_programs] and sizes.is_whole:
        return Persistent(WIDE_ROWS, 4, 4, has_fp8_rows=sizes.weights != "")
    return _first(steps, num_tokens)


def _first(steps: list[tuple[int, Plan]], num_tokens: int) -> Plan:
    return next((plan for most, plan in steps if num_tokens <= most), steps[-1][1])


def as_json(plan: Plan) -> dict[str, Any]:
    """The JSON object that `from_json` reads."""
    return {"kind": type(plan).__name__.lower(), **asdict(plan)}


def from_json(values: Mapping[str, Any]) -> Plan:
    """The plan of `as_json`. Raises KeyError or TypeError for anything else."""
    match values:
        case {"kind": "few", **rest}:
            return Few(**rest)
        case {"kind": "persistent", **rest}:
            return Persistent(**rest)
        case {"kind": "tiles", "gated": gated, "down": down, **rest}:
            return Tiles(gated=Cut(**gated), down=Cut(**down), **rest)
    raise KeyError(f"no plan: {values!r}")


@functools.cache
def _table() -> Mapping[str, list[tuple[int, Plan]]]:
    """By `Sizes.key`: plans, each with its maximum number of tokens."""
    if not TABLE.is_file():
        return {}
    return {
        key: [(int(step["tokens"]), from_json(step["plan"])) for step in steps]
        for key, steps in json.loads(TABLE.read_text())["mixtures"].items()
    }


_MOST_NARROW = {True: 256, False: 1024}  # by `has_programs`
# float32 is for tests: a tiling that fits into any GPU.
_EXACT = Tiles(16, Cut(32, 32, 2, 4), Cut(32, 32, 2, 4))
_DEFAULTS: list[tuple[int, Plan]] = [
    (4, Few(4, 2)),
    (256, Tiles(16, Cut(64, 128, 4, 4), Cut(64, 128, 4, 4))),
    (512, Tiles(32, Cut(64, 128, 3, 4), Cut(128, 128, 3, 4))),
    (1024, Tiles(64, Cut(128, 64, 3, 8), Cut(128, 64, 4, 4))),
    (1 << 30, Tiles(128, Cut(128, 64, 4, 8, 4), Cut(256, 64, 4, 8, 4))),
]
_TURNED = Cut(128, 128, 4, 4, is_turned=True)
_FP8_DEFAULTS: list[tuple[int, Plan]] = [
    (4, Few(4, 4)),
    (16, Tiles(16, _TURNED, _TURNED)),
    (256, Tiles(16, _TURNED, _TURNED, has_fp8_rows=True)),
    (512, Tiles(32, _TURNED, _TURNED, has_fp8_rows=True)),
    (1024, Tiles(64, Cut(128, 128, 3, 8), Cut(128, 128, 4, 4), has_fp8_rows=True)),
    (1 << 30, Tiles(64, Cut(128, 128, 3, 8, 4), Cut(128, 128, 4, 4, 4), has_fp8_rows=True)),
]
_PACKED = Cut(64, 128, 6, 4, is_turned=True)
_PACKED_WIDE = Cut(128, 128, 4, 8, group=4, is_turned=True)
_INT4_DEFAULTS: list[tuple[int, Plan]] = [
    (256, Tiles(16, _PACKED, _PACKED)),
    (512, Tiles(32, _PACKED, _PACKED)),
    (1024, Tiles(64, _PACKED_WIDE, _PACKED_WIDE)),
    (1 << 30, Tiles(128, _PACKED_WIDE, _PACKED_WIDE)),
]
