"""Compiles the kernels of mixtures of experts for Hopper, on any machine: python THIS.

Prints their resources as reported by ptxas; none may spill more than a few registers or need more
shared memory than available.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.knobs import nvidia

from baton.kernels.experts.few_tokens_triton import _BYTES_AHEAD, _STEP_OF_THREAD, _down, _gated
from baton.kernels.experts.grouped_triton import _grouped_product, _sum_pairs
from baton.kernels.experts.int4_experts_triton import _int4_grouped_product
from baton.kernels.experts.router_logits_triton import _logits, _logits_of_few
from baton.kernels.experts.routing_triton import _choose, _order
from baton.kernels.experts.tiles import Cut, Few, Persistent, Sizes, Tiles, choose_plan

MAX_SHARED_BYTES = 227 << 10
MOST_SPILLED_BYTES = 128  # per thread: one version of Triton spills where the next one does not
PTX_VERSION = 87  # supported by the ptxas of every Triton since 3.6
SCALINGS = ("", "fp8", "fp8-block")  # as Sizes.weights
_FLOATS = (
    *("x", "x_scale", "weights", "scale", "out", "out_scale", "router", "quantised"),
    *("gated", "products"),
)
POINTERS = {
    **dict.fromkeys(_FLOATS, "*bf16"),
    **dict.fromkeys(("pairs", "tiles", "chosen", "counts", "groups"), "*i32"),
    "words": "*i16",
    **dict.fromkeys(("logits", "shares"), "*fp32"),
    **dict.fromkeys(("slots", "loads"), "*i64"),
}
MULTIPLES = ("num_outputs", "num_inputs", "hidden", "inner", "columns")  # of 16, as in all models


@dataclass(frozen=True)
class Case:
    """A kernel, its constants, and its launch options."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    types: dict[str, str] = field(default_factory=dict)  # types that differ from POINTERS
    has_wgmma: bool = False

    def compile(self) -> tuple[str, int]:
        """The PTX, and the bytes of shared memory."""
        constants = self.constants | {"PDL": True}
        names = self.kernel.jit.arg_names
        types = POINTERS | self.types | dict.fromkeys(constants, "constexpr")
        signature = {name: types.get(name, "i32") for name in names}
        values = {(names.index(name),): value for name, value in constants.items()}
        aligned = [name for name in names if signature[name][0] == "*" or name in MULTIPLES]
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        source = ASTSource(self.kernel.jit, signature, values, attributes)
        options = {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "ptx_version": PTX_VERSION,
        }
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        return made.asm["ptx"], made.metadata.shared


def product_case(rows: int, cut: Cut, is_gated: bool, scaling: int, has_fp8_rows: bool) -> Case:
    constants = {
        "IS_GATED": is_gated,
        "SCALING": scaling,
        "HAS_FP8_ROWS": has_fp8_rows,
        "ROWS": rows,
        "OUTPUTS": cut.outputs,
        "INPUTS": cut.inputs,
        "IS_TURNED": cut.is_turned,
        "HAS_DESCRIPTOR": cut.has_descriptor,
        "IS_WHOLE": True,
        "PRECISION": "tf32",
    }
    types = {"shares": "*i32"} if is_gated else {}
    if scaling:
        types |= {"weights": "*fp8e4nv", "scale": "*fp32"}
    if has_fp8_rows:
        types |= {"x": "*fp8e4nv", "x_scale": "*fp32"}
        types |= {"out": "*fp8e4nv", "out_scale": "*fp32"} if is_gated else {}
    if cut.has_descriptor:
        element = "fp8e4nv" if scaling else "bf16"
        types["weights"] = f"tensordesc<{element}[{cut.outputs}, {cut.inputs}]>"
    has_wgmma = rows >= 64 or (cut.is_turned and cut.outputs >= 64)
    name = f"{'gated' if is_gated else 'down'} {rows} rows, {cut}, {SCALINGS[scaling]}"
    name += ", rows in FP8" if has_fp8_rows else ""
    return Case(name, _grouped_product, constants, cut.warps, cut.stages, types, has_wgmma)


def int4_case(rows: int, cut: Cut, is_gated: bool, group_size: int = 128) -> Case:
    constants = {
        "IS_GATED": is_gated,
        "IS_WHOLE": True,
        "GROUP": group_size,
        "ROWS": rows,
        "OUTPUTS": cut.outputs,
        "HAS_ASM": True,
    }
    types = {"shares": "*i32"} if is_gated else {}
    name = f"{'gated' if is_gated else 'down'} {rows} rows, {cut}, int4 in groups of {group_size}"
    return Case(
        name, _int4_grouped_product, constants, cut.warps, cut.stages, types, has_wgmma=True
    )


def few_cases(plan: Few, sizes: Sizes, scaling: int) -> list[Case]:
    shared = {"K": sizes.num_chosen, "HIDDEN": sizes.hidden, "INNER": sizes.inner}
    shared["SCALING"] = scaling
    gated = {**shared, "OUTPUTS": plan.gated, "COLS": plan.inputs}
    padded, itemsize = triton.next_power_of_2(sizes.num_chosen), 1 if scaling else 2
    cols = 32 * plan.warps * _STEP_OF_THREAD // (padded * plan.down)
    down = {**shared, "OUTPUTS": plan.down, "K_PADDED": padded, "COLS": cols}
    ahead = _BYTES_AHEAD // (_STEP_OF_THREAD * itemsize)
    down["AHEAD"] = min(ahead, triton.cdiv(sizes.inner, cols))
    types = {"weights": "*fp8e4nv", "scale": "*fp32"} if scaling else {}
    return [
        Case(f"gated {plan}, {SCALINGS[scaling]}", _gated, gated, plan.warps, types=types),
        Case(f"down {plan}, {SCALINGS[scaling]}", _down, down, plan.warps, types=types),
    ]


def routing_cases() -> list[Case]:
    cases = [
        Case("logits of few", _logits_of_few, {"EXPERTS": 4, "COLS": 2048}, 4, types=_LOGITS),
        Case("sum", _sum_pairs, {"K": 8, "BLOCK": 1024}, 4),
    ]
    for (tokens, experts), quantises in itertools.product(
        ((16, 16), (16, 64), (64, 64), (64, 128)), (False, True)
    ):
        constants = {"TOKENS": tokens, "EXPERTS": experts, "COLS": 128, "PRECISION": "tf32"}
        types = _LOGITS | ({"quantised": "*fp8e4nv", "scale": "*fp32"} if quantises else _LOGITS)
        name = f"logits {tokens} x {experts}{', quantising' if quantises else ''}"
        cases.append(Case(name, _logits, constants | {"QUANTISES": quantises}, 4, 4, types))
    flags = {"IS_NORMED": True, "IS_COUNTED": True, "HAS_SLOTS": True}
    for tokens, is_ordered in itertools.product((1, 4, 8, 16, 32), (False, True)):
        sizes = {"K": 8, "EXPERTS": 128, "TOKENS": tokens, "TILE_BLOCK": 64}
        constants = sizes | flags | {"K_PADDED": 8, "PARTS": 4, "IS_ORDERED": is_ordered}
        name = f"choose {tokens}{', ordered' if is_ordered else ''}"
        warps = min(16, max(tokens, 4 if is_ordered else 1))
        cases.append(Case(name, _choose, constants, warps, types={"weights": "*fp32"}))
        if is_ordered and tokens >= 8:  # fewer tokens are ordered where their experts are chosen
            cases.append(Case(f"order {tokens}", _order, sizes | {"COUNT_BLOCK": 32}, warps))
    return cases


_LOGITS = {"out": "*fp32"}


def spills(ptx: str) -> str:
    """ptxas's lines about registers and spills."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(path), "-o", "/dev/null"]
        found = subprocess.run(command, capture_output=True, text=True)
    printed = found.stdout + found.stderr
    assert found.returncode == 0, printed
    return " ".join(
        line.strip() for line in printed.splitlines() if "spill" in line or "Used" in line
    )


def is_good(case: Case) -> bool:
    ptx, shared = case.compile()
    printed = spills(ptx)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", printed)
    good = shared <= MAX_SHARED_BYTES and int(spilled) <= MOST_SPILLED_BYTES
    good &= "wgmma" in ptx or not case.has_wgmma
    print("ok " if good else "BAD", case.name, f"{shared} bytes shared,", printed)
    return good


MIXTURES = (Sizes(128, 8, 2048, 768), Sizes(8, 2, 4096, 14_336), Sizes(8, 2, 4096, 192))


def plans_of(sizes: Sizes) -> set[Few | Tiles]:
    """All plans, also for GPUs without persistent programs."""
    plans = {
        choose_plan(sizes, 2**n, 2, has_programs=has_programs)
        for n in range(15)
        for has_programs in (True, False)
    }
    return {plan.tiles if isinstance(plan, Persistent) else plan for plan in plans}


if __name__ == "__main__":
    plans = {
        (plan, sizes, scaling)
        for sizes in MIXTURES
        for scaling, name in enumerate(SCALINGS)
        for plan in plans_of(replace(sizes, weights=name))
    }
    products = {
        (plan.rows, replace(cut, group=1), is_gated, scaling, plan.has_fp8_rows)
        for plan, _, scaling in plans
        if not isinstance(plan, Few)
        for cut, is_gated in ((plan.gated, True), (plan.down, False))
    }
    packed = {
        (plan.rows, replace(cut, group=1), is_gated)
        for sizes in MIXTURES
        for plan in plans_of(replace(sizes, weights="int4"))
        if not isinstance(plan, Few)
        for cut, is_gated in ((plan.gated, True), (plan.down, False))
    }
    cases = [product_case(*product) for product in sorted(products, key=str)]
    cases += [int4_case(*product) for product in sorted(packed, key=str)]
    cases.append(int4_case(16, Cut(64, 128, 4, 4), True, 32))
    for few, sizes, scaling in plans:
        cases += few_cases(few, sizes, scaling) if isinstance(few, Few) else []
    with ThreadPoolExecutor(2) as pool:
        sys.exit(0 if all(list(pool.map(is_good, cases + routing_cases()))) else 1)
