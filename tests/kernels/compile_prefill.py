"""Compiles the prefill kernel for Hopper, on any machine: python THIS DIM BLOCK_SIZE."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from baton.kernels.attention import prefill_gluon
from baton.kernels.attention.prefill_gluon import _attend_tiles


def compile_for_hopper(dim: int, block_size: int) -> str:
    """The kernel's PTX."""
    constants = {
        "KV_HEADS": 8,
        "GROUP": 4,
        "BLOCK_SIZE": block_size,
        "PARTS": dim // 64,
        "SLOTS": prefill_gluon._SLOTS,
        "PDL": True,
    }
    pointers = {
        **dict.fromkeys(("q", "out"), "*bf16"),
        **dict.fromkeys(("tiles", "slices", "indices"), "*i32"),
        **dict.fromkeys(("partial", "log_sums"), "*fp32"),
    }
    multiples = {"q_stride": "i32", "block_rows": "i32"}  # of 16, like pointers
    types = {
        **pointers,
        **multiples,
        "pages": f"tensordesc<bf16{[block_size, 64]},{prefill_gluon._layout()!r}>",
        "num_tiles": "i32",
        "scale": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    names = _attend_tiles.jit.arg_names
    signature = {name: types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = (*pointers, *multiples)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(_attend_tiles.jit, signature, values, attributes)
    options = {"num_warps": prefill_gluon._WARPS, "maxnreg": prefill_gluon._REGISTERS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


if __name__ == "__main__":
    ptx = compile_for_hopper(*map(int, sys.argv[1:]))
    assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx
    # Decodes start after the wait of the warp that fills slots, which is the last one in the PTX.
    assert ptx.index("griddepcontrol.launch_dependents") > ptx.rindex("griddepcontrol.wait")
    print("compiled")
