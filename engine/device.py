"""Which device an engine computes on, in which type, and with which kernels."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ..core.config import EngineConfig
from ..core.errors import StartupFailed
from ..kernels.attention import AttentionBackend
from ..kernels.attention_torch import TorchAttention
from .layers import Placement
from .model_config import ModelConfig

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_FLASHINFER_HEAD_DIMS = (64, 128, 256)


def choose_placement(config: EngineConfig, model: ModelConfig) -> Placement:
    """The device, type and kernels that `--device` and `--dtype` mean here.

    Raises StartupFailed for a device or type that there is not.
    """
    if config.tensor_parallel_size > 1:
        raise StartupFailed("this build has no tensor parallelism", hint="--tp 1")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device.startswith("cuda"):
        _check_gpu(config.device, num_gpus)
    if config.device == "cpu" or not num_gpus:
        dtype = "float32" if config.dtype == "auto" else config.dtype
        return Placement(torch.device("cpu"), _DTYPES[dtype])
    if not _has("triton"):
        raise StartupFailed("a GPU engine needs Triton", hint="pip install 'baton-serve[gpu]'")
    from ..kernels.ops_triton import TritonOps

    dtype = model.dtype if config.dtype == "auto" else config.dtype
    if dtype not in _DTYPES:
        raise StartupFailed(f"the checkpoint is in {dtype}", hint="--dtype bfloat16")
    device = torch.device("cuda:0" if config.device in ("auto", "cuda") else config.device)
    torch.cuda.set_device(device)
    return Placement(device, _DTYPES[dtype], TritonOps())


def _check_gpu(device: str, num_gpus: int) -> None:
    """`device` is cuda, or cuda:N as --gpus N gives it."""
    if not num_gpus:
        raise StartupFailed("torch sees no GPU here: --gpus needs one", hint="--device cpu")
    index = torch.device(device).index
    if index is not None and index >= num_gpus:
        raise StartupFailed(
            f"--gpus {index}: this host has GPUs 0 to {num_gpus - 1}", hint="nvidia-smi -L"
        )


def choose_attention(config: EngineConfig, model: ModelConfig, placement: Placement) -> str:
    """The name of the attention backend that `--attention-backend` means here.

    Raises StartupFailed if it cannot compute this model on this device.
    """
    wanted = config.attention_backend
    if placement.device.type == "cpu":
        if wanted not in ("auto", "torch"):
            raise StartupFailed(
                f"--attention-backend {wanted} needs a GPU", hint="--attention-backend torch"
            )
        return "torch"
    why_not = _why_not_flashinfer(config, model, placement)
    if wanted == "flashinfer" and why_not:
        raise StartupFailed(
            f"--attention-backend flashinfer: {why_not}", hint="--attention-backend triton"
        )
    if wanted == "auto":
        return "triton" if why_not else "flashinfer"
    return wanted


def make_attention(
    name: str, pool: Tensor, config: EngineConfig, model: ModelConfig, max_model_len: int
) -> AttentionBackend:
    """The backend of that name over `pool`."""
    if name == "flashinfer":
        from ..kernels.attention_flashinfer import FlashInferAttention

        return FlashInferAttention(pool, model.num_heads, config.max_num_seqs, max_model_len)
    if name == "triton":
        from ..kernels.attention_triton import TritonAttention

        return TritonAttention(pool, config.max_num_seqs, max_model_len)
    return TorchAttention(pool)


def _why_not_flashinfer(config: EngineConfig, model: ModelConfig, placement: Placement) -> str:
    """Empty if FlashInfer can compute this."""
    if not _has("flashinfer"):
        return "it is not installed"
    if placement.dtype == torch.float32:
        return "it has no float32"
    if model.head_dim not in _FLASHINFER_HEAD_DIMS:
        return f"it has no heads of {model.head_dim} dimensions"
    return ""


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
