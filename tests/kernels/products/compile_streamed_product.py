"""Compiles the kernel of streamed products for Hopper, on any machine: python THIS CASE..."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from baton.kernels.products.streamed_product import Stages
from baton.kernels.products.streamed_product_gluon import _REGISTERS, _WARPS, _streamed_product
from baton.kernels.row_room import ROWS_AT_ONCE

# Stages, whether it is gated, ranks that it is sent to, and from one's part to the next one's.
CASES = [
    (Stages(32, 128, 9, 3), False, 1, 0),
    (Stages(64, 128, 6, 4), False, 1, 0),
    (Stages(128, 128, 4, 3), False, 1, 0),
    (Stages(64, 128, 4, 2), True, 1, 0),
    (Stages(32, 128, 9, 3), False, 2, 0),
    (Stages(64, 128, 6, 4), False, 4, 2048),
]


def boxes(*box: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)
    return f"tensordesc<bf16{list(box)},{layout!r}>"


def compile_for_hopper(stages: Stages, is_gated: bool, ranks: int, pitch: int) -> str:
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
        "PDL": True,
    }
    types = {
        "vectors": boxes(ROWS_AT_ONCE, stages.inputs),
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
    options = {"num_warps": _WARPS, "maxnreg": _REGISTERS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


if __name__ == "__main__":
    cases = [CASES[int(number)] for number in sys.argv[1:]]
    for case in cases:
        ptx = compile_for_hopper(*case)
        # The warp that fills stages is the last in the text; what is sent waits, too.
        weight_asked, waited = ptx.index("cp.async.bulk.tensor"), ptx.rindex("griddepcontrol.wait")
        assert weight_asked < waited, "the weight waits for what is in front"
        assert "wgmma" in ptx
        num_ranks = case[2]
        assert ("st.global.v4" in ptx) == (num_ranks > 1), "16 bytes go at once to a peer"
    print("compiled", len(cases))
