"""Compiles the grouped products of experts for Hopper, on any machine: python THIS.

Prints what each program takes, which ptxas knows; none may spill registers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton.kernels.experts.grouped_triton import _grouped_product
from baton.kernels.experts.tiles import Cut, Tiles, all_plans

MAX_SHARED_BYTES = 227 << 10
_PTX_VERSION = 87  # that the ptxas of every Triton since 3.6 knows


def compile_for_hopper(rows: int, cut: Cut, is_gated: bool) -> tuple[str, int]:
    """The kernel's PTX and its shared memory in bytes."""
    constants = {
        "IS_GATED": is_gated,
        "ROWS": rows,
        "OUTPUTS": cut.outputs,
        "INPUTS": cut.inputs,
        "GROUP": cut.group,
        "IS_TURNED": cut.is_turned,
        "IS_WHOLE": True,
        "PRECISION": "tf32",
        "PDL": True,
    }
    types = {
        **dict.fromkeys(("x", "weights", "out"), "*bf16"),
        **dict.fromkeys(("pairs", "tiles"), "*i32"),
        "shares": "*i32" if is_gated else "*fp32",
        **dict.fromkeys(
            ("num_tiles", "num_experts", "num_chosen", "num_outputs", "num_inputs"), "i32"
        ),
        **dict.fromkeys(constants, "constexpr"),
    }
    names = _grouped_product.arg_names
    signature = {name: types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    multiples = ("x", "weights", "out", "pairs", "tiles", "shares", "num_outputs", "num_inputs")
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = ASTSource(_grouped_product, signature, values, attributes)
    options = {"num_warps": cut.warps, "num_stages": cut.stages, "ptx_version": _PTX_VERSION}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.asm["ptx"], compiled.metadata.shared


def spilled(ptx: str) -> str:
    """What ptxas prints of registers and spills."""
    from triton.knobs import nvidia

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(path), "-o", "/dev/null"]
        found = subprocess.run(command, capture_output=True, text=True)
    said = found.stdout + found.stderr
    assert found.returncode == 0, said
    return " ".join(line.strip() for line in said.splitlines() if "spill" in line or "Used" in line)


def report(case: tuple[int, Cut, bool]) -> bool:
    """Whether it is good."""
    rows, cut, is_gated = case
    ptx, shared = compile_for_hopper(rows, cut, is_gated)
    said = spilled(ptx)
    is_good = shared <= MAX_SHARED_BYTES and "0 bytes spill stores" in said
    is_wide = rows >= 64 or (cut.is_turned and cut.outputs >= 64)
    is_good &= "wgmma" in ptx or not is_wide
    print("ok " if is_good else "BAD", rows, cut, "gated" if is_gated else "", shared, said[-160:])
    return is_good


if __name__ == "__main__":
    plans = [plan for plan in all_plans() if isinstance(plan, Tiles)]
    cases = {(plan.rows, plan.gated, True) for plan in plans}
    cases |= {(plan.rows, plan.down, False) for plan in plans}
    with ThreadPoolExecutor(2) as pool:
        sys.exit(0 if all(list(pool.map(report, sorted(cases, key=str)))) else 1)
