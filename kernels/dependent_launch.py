"""Programmatic dependent launch: a kernel starts while the previous one finishes (from Hopper on).

    let_next_in()         the next kernel may start once all programs have called this
    wait_for_previous()   waits for completion of all earlier kernels: before the first access to
                          memory that other kernels write or read; constants may be loaded earlier

Products and prefill call let_next_in after their own wait. So a kernel launched right after one of
them runs concurrently and may read, without waiting, what that kernel reads. It must wait before it
writes what that kernel may access (lora_triton.py), or at its end if they share no memory
(decode_attention_triton.py). Between small kernels this hides most of the launch latency, which
otherwise costs about as much as the kernel.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Options for launching, on `device`, a kernel that calls the functions below."""
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
