"""The GPUs of this host, and whether blocks can pass between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .finding import Finding, ok, problem, warning

_MIN_FREE_SHARE = 0.5  # the default --gpu-memory-utilization wants 0.9


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device; `peers` are the indices of those whose memory it can map."""

    index: int
    name: str
    free_bytes: int
    total_bytes: int
    peers: frozenset[int]


def find_gpus() -> list[Gpu]:
    """Those that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    return [_look_at(index, count) for index in range(count)]


def _look_at(index: int, count: int) -> Gpu:
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    others = (i for i in range(count) if i != index)
    peers = frozenset(i for i in others if torch.cuda.can_device_access_peer(index, i))
    return Gpu(index, torch.cuda.get_device_name(index), free_bytes, total_bytes, peers)


def check_gpus(gpus: Sequence[Gpu]) -> list[Finding]:
    """One finding for each GPU, and one for the paths between them."""
    if not gpus:
        return [ok("GPUs", "none: engines run on the CPU")]
    findings = [_check_memory(gpu) for gpu in gpus]
    missing = [
        f"{gpu.index}-{other.index}"
        for gpu in gpus
        for other in gpus
        if gpu.index < other.index and other.index not in gpu.peers
    ]
    if missing:
        findings.append(
            warning(
                "peer access",
                f"none between {', '.join(missing)}",
                "KV cannot be read over NVLink or PCIe there: pair other GPUs",
            )
        )
    elif len(gpus) > 1:
        findings.append(ok("peer access", "between all GPUs"))
    return findings


def _check_memory(gpu: Gpu) -> Finding:
    text = f"{gpu.name}, {gpu.free_bytes / 2**30:.0f} of {gpu.total_bytes / 2**30:.0f} GiB free"
    if gpu.free_bytes < _MIN_FREE_SHARE * gpu.total_bytes:
        advice = "another process holds its memory (nvidia-smi): an engine takes what is left"
        return warning(f"GPU {gpu.index}", text, advice)
    return ok(f"GPU {gpu.index}", text)


def check_kernels(has_gpu: bool, has_triton: bool, has_flashinfer: bool) -> list[Finding]:
    """The packages that only GPU engines use."""
    if not has_gpu:
        return [ok("GPU kernels", "not needed without a GPU")]
    advice = "pip install 'baton-serve[gpu]'"
    return [
        ok("triton", "found")
        if has_triton
        else problem("triton", "is missing, and a GPU engine needs it", advice),
        ok("flashinfer", "found")
        if has_flashinfer
        else warning("flashinfer", "is missing: attention runs on slower Triton kernels", advice),
    ]
