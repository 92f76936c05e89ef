"""Compiles the kernel of streamed GEMMs for Hopper, on any machine: python THIS CASE..."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from baton.kernels.products.streamed_product import StreamTiling
from baton.kernels.products.streamed_product_gluon import _streamed_product, cost

# Rows, stages, whether gated, ranks that receive the output, distance of their parts.
CASES = [
    (64, StreamTiling(32, 128, 9, 3), False, 1, 0),
    (64, StreamTiling(64, 128, 6, 4), False, 1, 0),
    (64, StreamTiling(128, 128, 4, 3), False, 1, 0),
    (64, StreamTiling(64, 128, 4, 2), True, 1, 0),
    (64, StreamTiling(32, 128, 9, 3), False, 2, 0),
    (64, StreamTiling(64, 128, 6, 4), False, 4, 2048),
    (128, StreamTiling(64, 128, 4, 3), False, 1, 0),
    (128, StreamTiling(128, 64, 7, 3, shares=4), False, 1, 0),
    (128, StreamTiling(256, 64, 4, 3, shares=8), False, 1, 0),
    (128, StreamTiling(128, 64, 4, 3), True, 1, 0),
    (128, StreamTiling(64, 128, 4, 3), False, 4, 2048),
]
_SHARED_BYTES = 227 << 10  # available to a program


def boxes(*box: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)
    return f"tensordesc<bf16{list(box)},{layout!r}>"


def compile_for_hopper(
    rows: int, stages: StreamTiling, is_gated: bool, ranks: int, pitch: int
) -> str:
    """The kernel's PTX."""
    constants = {
        "HAS_BIAS": True,
        "IS_GATED": is_gated,
        "RANKS": ranks,
        "PITCH": pitch,
        "OUTPUTS": stages.outputs,
        "INPUTS": stages.inputs,
        "STAGES": stages.count,
        "EARLY": stages.early,
        "SHARES": stages.shares,
        "PDL": True,
    }
    types = {
        "vectors": boxes(rows, stages.inputs),
        "matrix": boxes(stages.outputs, stages.inputs),
        "bias": "*bf16",
        "out": "*i64" if ranks > 1 else "*bf16",
        **dict.fromkeys(("num_rows", "num_outputs", "num_inputs", "rank"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    names = _streamed_product.jit.arg_names
    signature = {name: types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    multiples = ("bias", "out", "num_outputs", "num_inputs")  # of 16, as in all models
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = GluonASTSource(_streamed_product.jit, signature, values, attributes)
    options = cost(stages, rows, is_gated=is_gated)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= _SHARED_BYTES, f"{stages}: {compiled.metadata.shared} bytes"
    ptx: str = compiled.asm["ptx"]
    return ptx


if __name__ == "__main__":
    cases = [CASES[int(number)] for number in sys.argv[1:]]
    for case in cases:
        ptx = compile_for_hopper(*case)
        # The warp that fills stages is the last one in the PTX; kernels that send wait, too.
        weight_asked, waited = ptx.index("cp.async.bulk.tensor"), ptx.rindex("griddepcontrol.wait")
        assert weight_asked < waited, "the weight waits for what is in front"
        assert "wgmma" in ptx
        num_ranks = case[3]
        assert ("st.global.v4" in ptx) == (num_ranks > 1), "16 bytes go at once to a peer"
    print("compiled", len(cases))
