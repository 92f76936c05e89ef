"""Programmatic dependent launch: a kernel comes in while the one before it leaves (Hopper on).

    let_next_in()         the next kernel may be launched once all programs have come here
    wait_for_previous()   until all before has completed: before the first access to anything that
                          other kernels write or read; only constants may be loaded earlier

A product, or a prefill, lets the next in behind its own wait. So a kernel that is launched right
behind one may read what that one reads without waiting, beside it. It waits before it writes what
that one may (lora_triton.py), or at its end if they share nothing (decode_attention_triton.py).

Between small kernels this hides most of the launch, which else costs about as much as the kernel.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """What a kernel that calls the two functions is launched with on `device`."""
    has_it = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"PDL": has_it, "launch_pdl": has_it}


@triton.jit
def let_next_in(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
