"""Compiles the GEMMs with quantised weights for Hopper, on any machine: python THIS KERNEL..."""

from __future__ import annotations

import argparse

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from baton.kernels.experts import fp8_experts_gluon, wide_tiles_gluon
from baton.kernels.experts.tiles import Persistent
from baton.kernels.layers.ops_triton import _add_rms_norm
from baton.kernels.layers.quantise_triton import _quantise
from baton.kernels.products.fp8_streamed_gluon import _fp8_streamed, registers
from baton.kernels.products.fp8_triton import Fp8Stages, _fp8_few_rows
from baton.kernels.products.int4_row_gluon import _int4_row
from baton.kernels.products.int4_row_gluon import layout_of as row_layout_of
from baton.kernels.products.int4_row_gluon import registers as row_registers
from baton.kernels.products.int4_streamed_gluon import _int4_streamed, layout_of
from baton.kernels.products.int4_streamed_gluon import registers as int4_registers
from baton.kernels.products.int4_triton import (
    Int4Row,
    Int4Stages,
    Int4Tiling,
    _dequantise,
    _int4_product,
)

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    "x": "*fp8e4nv",
    "weight": "*fp8e4nv",
    "out": "*bf16",
    "bias": "*bf16",
    "scale": "*fp32",
    "x_scale": "*fp32",
    "out_scale": "*fp32",
    "residual": "*bf16",
    "eps": "fp32",
    "words": "*i16",
    "groups": "*i32",
    "parts": "*fp32",
    "turns": "*i32",
    "pairs": "*i32",
    "tiles": "*i32",
}
NUMBERS = ("num_rows", "room", "num_ahead", "num_tiles", "num_experts", "num_chosen", "group")


def compiled(kernel, constants, types, options, source=ASTSource):  # type: ignore[no-untyped-def]
    names = kernel.jit.arg_names
    kinds = POINTERS | types | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [n for n in names if n not in constants and n not in NUMBERS and n != "eps"]
    aligned = [n for n in aligned if not signature[n].startswith("tensordesc")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    made = source(kernel.jit, signature, values, attributes)
    return triton.compile(made, target=TARGET, options=options).asm["ptx"]


def boxes(num_rows: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([num_rows, 128], gl.float8e4nv)
    return f"tensordesc<fp8e4nv[{num_rows}, 128],{layout!r}>"


def streamed(stages: Fp8Stages, rows: int, is_blocked: bool, groups: int | None = None) -> str:
    constants = {
        "HAS_BIAS": True,
        "IS_BLOCKED": is_blocked,
        "GROUPS": (128 if is_blocked else 0) if groups is None else groups,
        "ROWS": rows,
        "OUTPUTS": stages.outputs,
        "CHUNKS": stages.chunks,
        "STAGES": stages.count,
        "EARLY": stages.early,
        "SHARES": stages.shares,
        "IS_TURNED": stages.is_turned,
        "WARPS": stages.warps,
        "PDL": True,
    }
    types = {"vectors": boxes(rows), "matrix": boxes(stages.outputs)}
    options = {"num_warps": stages.warps, "maxnreg": registers(stages, rows)}
    ptx = compiled(_fp8_streamed, constants, types, options, GluonASTSource)
    weight_asked, waited = ptx.index("cp.async.bulk.tensor"), ptx.rindex("griddepcontrol.wait")
    assert weight_asked < waited, "the weight waits for what is in front"
    columns = rows if stages.is_turned else stages.outputs
    assert f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3" in ptx
    return str(ptx)


def few_rows(outputs: int, rows: int, is_blocked: bool) -> str:
    constants = {
        "HAS_BIAS": False,
        "IS_BLOCKED": is_blocked,
        "IS_WHOLE": True,
        "ROWS": rows,
        "OUTPUTS": outputs,
        "PDL": True,
    }
    ptx = compiled(_fp8_few_rows, constants, {}, {"num_warps": 4, "num_stages": 4})
    assert "e4m3.e4m3" in ptx, "the matrix units multiply something else"
    return str(ptx)


def quantise(way: int, is_gated: bool) -> str:
    constants = {"IS_GATED": is_gated, "WAY": way, "COLS": 1024, "PDL": True}
    return str(compiled(_quantise, constants, {"x": "*bf16", "out": "*fp8e4nv"}, {"num_warps": 4}))


def norm(way: int, summands: int = 1) -> str:
    constants = {
        "WAY": way,
        "HAS_RESIDUAL": True,
        "HAS_SCALES": way == 1,
        "SUMMANDS": summands,
        "BLOCK": 4096,
        "PDL": True,
    }
    types = {"x": "*bf16", "weight": "*bf16", "out": "*fp8e4nv"}
    types |= {"of_rows": "*fp32", "of_outputs": "*fp32"}
    return str(compiled(_add_rms_norm, constants, types, {"num_warps": 8}))


def int4(
    rows: int,
    tiling: Int4Tiling,
    group_size: int,
    kind: str = "bf16",
    *,
    is_gated: bool = False,
) -> None:
    constants = {
        "HAS_BIAS": True,
        "IS_GATED": is_gated,
        "IS_WHOLE": True,
        "GROUP": group_size,
        "ROWS": rows,
        "OUTPUTS": tiling.outputs,
        "SHARES": tiling.shares,
        "HAS_ASM": True,
        "PDL": True,
    }
    types = POINTERS | dict.fromkeys(("x", "bias", "out"), f"*{kind}")
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    ptx = compiled(_int4_product, constants, types, options)
    assert "cp.async.cg.shared.global" in ptx, "words are loaded a few bytes at a time"
    assert "lop3.b32" in ptx and "cp.async.bulk.prefetch.L2" in ptx
    if tiling.outputs >= 64:
        of = kind.replace("fp", "f")
        wide = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{of}.{of}"
        assert wide in ptx or tiling.warps == 8, "the matrix units multiply something else"


def dequantise() -> None:
    constants = {"GROUP": 128, "OUTPUTS": 32, "PDL": True}
    compiled(_dequantise, constants, {}, {"num_warps": 4})


def int4_boxes(num_rows: int, num_columns: int, kind: torch.dtype, name: str) -> str:
    layout = layout_of((num_rows, num_columns), kind)
    return f"tensordesc<{name}[{num_rows}, {num_columns}],{layout!r}>"


def int4_streamed(
    stages: Int4Stages, rows: int, kind: str = "bf16", *, is_gated: bool = False
) -> None:
    constants = {
        "HAS_BIAS": True,
        "IS_GATED": is_gated,
        "ROWS": rows,
        "OUTPUTS": stages.outputs,
        "CHUNKS": stages.chunks,
        "STAGES": stages.count,
        "EARLY": stages.early,
        "SHARES": stages.shares,
        "WARPS": stages.warps,
        "PDL": True,
    }
    box = stages.outputs // 2 if is_gated else stages.outputs
    types = {
        "vectors": int4_boxes(rows, 128, torch.float16 if kind == "fp16" else torch.bfloat16, kind),
        "matrix": int4_boxes(box, 32, torch.int16, "i16"),
        "groups": int4_boxes(1, box, torch.int32, "i32"),
        "bias": f"*{kind}",
        "out": f"*{kind}",
    }
    options = {"num_warps": stages.warps, "maxnreg": int4_registers(stages, rows)}
    ptx = compiled(_int4_streamed, constants, types, options, GluonASTSource)
    weight_asked, waited = ptx.index("cp.async.bulk.tensor"), ptx.rindex("griddepcontrol.wait")
    assert weight_asked < waited, "the weight waits for what is in front"
    of = kind.replace("fp", "f")
    assert f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{of}.{of}" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4" in ptx, "words are not where wgmma takes them"
    assert_read(ptx)


def assert_read(ptx: str) -> None:
    """Check that wgmma has read a stage before TMA refills it."""
    for before in ptx.split("mbarrier.arrive.shared::cta.b64 _")[:-1]:
        _, is_multiplied, behind = before.rpartition("wgmma.mma_async")
        assert not is_multiplied or "ld.shared" not in behind, "a stage is given back while read"


def int4_row(way: Int4Row, kind: str = "bf16", *, is_gated: bool = False) -> None:
    constants = {
        "HAS_BIAS": True,
        "CHUNKS": way.chunks,
        "STAGES": way.count,
        "EARLY": way.early,
        "PDL": True,
    }

    def boxes_of(box: tuple[int, ...], dtype: torch.dtype, name: str) -> str:
        return f"tensordesc<{name}{list(box)},{row_layout_of(box, dtype)!r}>"

    halves, shares = 2 if is_gated else 1, way.shares
    box = (shares, 1, halves, way.rows // shares // halves)
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    types = {
        "vector": boxes_of((shares, way.chunks, 128), dtype, kind),
        "matrix": boxes_of((*box, 64), torch.uint8, "u8"),
        "groups": boxes_of(box, torch.int32, "i32"),
        "bias": f"*{kind}",
        "out": f"*{kind}",
    }
    options = {"num_warps": way.warps, "maxnreg": row_registers(way)}
    ptx = compiled(_int4_row, constants, types, options, GluonASTSource)
    weight_asked, waited = ptx.index("cp.async.bulk.tensor"), ptx.rindex("griddepcontrol.wait")
    assert weight_asked < waited, "the weight waits for what is in front"
    assert f"wgmma.mma_async.sync.aligned.m64n{4 * shares}k32.f32.e4m3.e5m2" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4" in ptx, "words are not where wgmma takes them"
    assert_read(ptx)


def persistent_experts(plan: Persistent, is_gated: bool, is_blocked: bool) -> None:
    constants = {
        "IS_GATED": is_gated,
        "IS_BLOCKED": is_blocked,
        "GROUPS": 16,
        "ROWS": plan.rows,
        "STAGES": plan.gated if is_gated else plan.down,
        "PDL": True,
    }
    types = {"vectors": "*fp8e4nv" if is_gated else boxes(plan.rows), "matrix": boxes(128)}
    types |= {"shares": "*i32", "out": "*fp8e4nv"} if is_gated else {"shares": "*fp32"}
    options = {"num_warps": 4, "maxnreg": fp8_experts_gluon._REGISTERS}
    ptx = compiled(fp8_experts_gluon._experts, constants, types, options, GluonASTSource)
    assert f"wgmma.mma_async.sync.aligned.m64n{plan.rows}k32.f32.e4m3.e4m3" in ptx
    filled = ptx[ptx.index("cp.async.bulk.tensor") :]
    assert "griddepcontrol.wait" in filled, "the weight waits for what is in front"


def wide_tiles(is_gated: bool, scaling: int) -> None:
    constants = {"IS_GATED": is_gated, "SCALING": scaling, "STAGES": 4, "PDL": True}
    itemsize, element = (1, "fp8e4nv") if scaling else (2, "bf16")
    layout, floats = wide_tiles_gluon._layout(itemsize), "*fp32" if scaling else "*bf16"

    def of_rows(count: int) -> str:
        return f"tensordesc<{element}[{count}, {128 // itemsize}],{layout!r}>"

    types = {"vectors": f"*{element}" if is_gated else of_rows(64), "matrix": of_rows(128)}
    types |= {"x_scale": floats, "scale": floats, "shares": "*i32" if is_gated else "*fp32"}
    types |= {"out": f"*{element}" if is_gated else "*bf16", "out_scale": floats}
    options = {"num_warps": 4, "maxnreg": wide_tiles_gluon._REGISTERS}
    ptx = compiled(wide_tiles_gluon._wide_tiles, constants, types, options, GluonASTSource)
    kind = "k32.f32.e4m3.e4m3" if scaling else "k16.f32.bf16.bf16"
    # Each of the two warp groups has its own instructions.
    assert ptx.count(f"wgmma.mma_async.sync.aligned.m64n128{kind}") == 2 * 2 * 4


CASES = {
    "streamed": [
        lambda: streamed(Fp8Stages(64, 1, 6, 3), 16, True),
        lambda: streamed(Fp8Stages(32, 2, 4, 3), 64, False),
        lambda: streamed(Fp8Stages(32, 2, 4, 3), 32, True),
        lambda: streamed(Fp8Stages(64, 2, 3, 2), 64, True),
        lambda: streamed(Fp8Stages(128, 1, 4, 2), 64, True),
    ],
    "turned": [
        lambda: streamed(Fp8Stages(64, 2, 4, 3, is_turned=True), 32, True),
        lambda: streamed(Fp8Stages(32, 1, 6, 3, is_turned=True), 16, False),
        lambda: streamed(Fp8Stages(128, 2, 3, 2, is_turned=True), 64, True),
        lambda: streamed(Fp8Stages(32, 2, 6, 3, is_turned=True), 16, False, groups=32),
        lambda: streamed(Fp8Stages(64, 2, 3, 2, is_turned=True), 128, True, groups=32),
        lambda: streamed(Fp8Stages(128, 2, 3, 2, True, 4, 8), 128, True, groups=32),
    ],
    "few_rows": [lambda: few_rows(64, 64, True), lambda: few_rows(64, 16, False)],
    "quantise": [lambda: quantise(2, True), lambda: quantise(1, False)],
    "norm": [lambda: norm(1), lambda: norm(2), lambda: norm(0, 8)],
    "experts": [
        lambda: persistent_experts(Persistent(16, 6, 11), True, False),
        lambda: persistent_experts(Persistent(32, 5, 10), False, True),
    ],
    "wide_tiles": [
        lambda: wide_tiles(True, 1),
        lambda: wide_tiles(True, 0),
        lambda: wide_tiles(False, 2),
    ],
    "int4": [
        lambda: int4(16, Int4Tiling(64, 4, 6), 128),
        lambda: int4(64, Int4Tiling(128, 4, 4, 8), 128, is_gated=True),
        lambda: int4(16, Int4Tiling(64, 1, 6), 32),
        lambda: int4(128, Int4Tiling(128, 2, 3, 8), 128),
        lambda: int4(32, Int4Tiling(64, 2, 4), 128, "fp16"),
    ],
    "int4_dequantised": [dequantise],
    "int4_streamed": [
        lambda: int4_streamed(Int4Stages(64, 4, 2, 4, 3), 8),
        lambda: int4_streamed(Int4Stages(256, 2, 1, 4, 3, 8), 64, is_gated=True),
        lambda: int4_streamed(Int4Stages(128, 1, 2, 4, 3, 8), 64),
        lambda: int4_streamed(Int4Stages(64, 2, 4, 3, 2), 16, "fp16"),
    ],
    "int4_row": [
        lambda: int4_row(Int4Row(64, 2, 4, 3, 2, 4, 2)),
        lambda: int4_row(Int4Row(128, 2, 2, 4, 3, 4, 2), is_gated=True),
        lambda: int4_row(Int4Row(128, 4, 4, 3, 2, 8, 1), "fp16"),
    ],
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="+", choices=CASES)
    parser.add_argument("--first", action="store_true", help="one case of each kernel")
    arguments = parser.parse_args()
    for name in arguments.kernels:
        for compile_case in CASES[name][: 1 if arguments.first else None]:
            compile_case()
        print("compiled", name)
