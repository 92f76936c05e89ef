"""Triton kernels with little launch overhead on the host: a quick look-up of the compiled kernel.

A launch by `triton.jit` takes 50 to 80 us of a server's processor, mostly to find the compiled
kernel: it formats options as text and compares the globals that the kernel uses. A step of many
tokens does not use a CUDA graph; its 400 launches would take longer than the GPU's work. Here the
key is what Triton distinguishes: types, alignment, constants, options. Put `@launched` above
`@triton.jit` of kernels that are launched, not of functions that kernels call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

_ALIGNED = 16  # kernels are compiled for pointers (in bytes) and integers that are multiples


def cdiv(number: int, by: int) -> int:
    """number / by, rounded up. `triton.cdiv`, which also works in kernels, takes 3 us."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least power of 2 that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU: persistent kernels have a fixed number of programs for each."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Launched:
    """A kernel `jit` of `triton.jit` or `gluon.jit`, launched in the same way, with constants and
    options by name."""

    def __init__(self, kernel: Any) -> None:
        self.jit = kernel
        self._is_compiled = isinstance(kernel, triton.JITFunction)  # and not interpreted
        self._compiled: dict[Hashable, tuple[Any, list[Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if not self._is_compiled:
            self.jit[grid](*args, **options)
            return
        key = (torch.cuda.current_device(), *map(_kind, args), *options.items())
        found = self._compiled.get(key)
        if found is None:
            params = self.jit.params
            has_names = [param.is_constexpr for param in params]
            if has_names != [False] * len(args) + [True] * (len(params) - len(args)):
                raise TypeError("constants are given by name, and nothing else is")
            constants = [options[param.name] for param in params[len(args) :]]
            self._compiled[key] = self.jit[grid](*args, **options), constants
            return
        compiled, constants = found
        x, y, z = (*grid, 1, 1)[:3]
        compiled[x, y, z](*args, *constants)


def launched(kernel: Any) -> Any:
    """See `Launched`."""
    return Launched(kernel)


def _kind(arg: Any) -> Hashable:
    """The properties of `arg` that a kernel is compiled for, at least as fine as Triton's own."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % _ALIGNED == 0
    if type(arg) is int:
        bits = (arg if arg >= 0 else ~arg).bit_length()
        return -1 if arg == 1 else (arg % _ALIGNED == 0) + 2 * (bits > 31) + 2 * (bits > 63)
    if arg is None or type(arg) in (bool, float):
        return type(arg).__name__
    # A tensor descriptor: of Triton, or of Gluon, which has a layout.
    return arg.base.dtype, tuple(arg.block_shape), getattr(arg, "layout", None)
