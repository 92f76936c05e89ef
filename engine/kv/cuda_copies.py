"""Many copies in one call, made by the copy engines: cudaMemcpyBatchAsync of CUDA 13, or one call
for each piece where the runtime is older. Between addresses of any kind that the driver knows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .cuda_memory import runtime

Ids: TypeAlias = npt.NDArray[np.int64]

_ANY_DIRECTION = 4  # cudaMemcpyDefault
_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_BATCH_SINCE = 13  # the major version of the runtime whose cudaMemcpyBatchAsync we call


def has_batches() -> bool:
    """Whether this CUDA runtime has the batched call in the form that we know."""
    version = ctypes.c_int()
    runtime().cudaRuntimeGetVersion(ctypes.byref(version))
    return version.value // 1000 >= _BATCH_SINCE


def copy_piece(source: int, target: int, num_bytes: int, stream: torch.cuda.Stream) -> int:
    """Behind what `stream` has been given; torch does not know of it. Returns a cudaError_t."""
    status: int = runtime().cudaMemcpyAsync(
        ctypes.c_void_p(target),
        ctypes.c_void_p(source),
        ctypes.c_size_t(num_bytes),
        _ANY_DIRECTION,
        ctypes.c_void_p(stream.cuda_stream),
    )
    return status


def batch_copy(
    sources: Ids, targets: Ids, lengths: Ids, stream: torch.cuda.Stream
) -> Callable[[], int]:
    """What copies all pieces, addresses and bytes [n], in one call that returns a cudaError_t.
    Needs `has_batches`."""
    arrays = [each.astype(np.uint64) for each in (targets, sources, lengths)]
    attributes = _CopyAttributes(srcAccessOrder=_STREAM_ORDER)
    first = ctypes.c_size_t(0)  # the attributes hold from the first piece on
    arguments = (
        *(array.ctypes.data_as(ctypes.c_void_p) for array in arrays),  # which keeps it alive
        ctypes.c_size_t(len(lengths)),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        ctypes.c_void_p(stream.cuda_stream),
    )

    def copy() -> int:
        status: int = runtime().cudaMemcpyBatchAsync(*arguments)
        return status

    return copy


class _Location(ctypes.Structure):
    """cudaMemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes; the hints are for managed memory alone."""

    _fields_ = [
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", _Location),
        ("dstLocHint", _Location),
        ("flags", ctypes.c_uint),
    ]
