"""Which device an engine computes on, in which type, and with which kernels."""

from __future__ import annotations

import importlib.util

import torch

from ...core.engine_config import EngineConfig
from ...core.errors import StartupFailed
from ...kernels.kv.kv_8bit import SCALE_BYTES
from ...kernels.layers.ops import Ops
from ..model.communicator import Communicator
from ..model.model_config import ModelConfig
from ..model.quantization import Quantization, stays_packed
from ..model.weights.placement import Placement

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_FP8_CAPABILITY = (8, 9)  # from which on a GPU knows FP8
_INT4_CAPABILITY = (8, 0)  # from which on it multiplies bfloat16
_FLASHINFER_HEAD_DIMS = (64, 128, 256)


def devices_of_ranks(config: EngineConfig) -> list[str]:
    """The device of each rank of this host; `cuda:2,3` are the GPUs of two.

    Raises StartupFailed if there are not as many as ranks.
    """
    size, device = config.ranks_per_host, config.device
    if device == "cpu" or not torch.cuda.is_available():
        return [device] * size
    _, _, numbers = device.partition(":")
    gpus = numbers.split(",") if numbers else [str(number) for number in range(size)]
    if len(gpus) != size:
        raise StartupFailed(f"{config.size_flags} with {len(gpus)} GPUs ({device})")
    return [f"cuda:{gpu}" for gpu in gpus]


def choose_placement(
    config: EngineConfig, model: ModelConfig, communicator: Communicator
) -> Placement:
    """The device, type and kernels that `--device` and `--dtype` select on this host.

    Raises StartupFailed for a device or type that there is not.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device.startswith("cuda"):
        _check_gpu(config.device, num_gpus)
    if config.device == "cpu" or not num_gpus:
        dtype = "float32" if config.dtype == "auto" else config.dtype
        return Placement(
            torch.device("cpu"),
            _DTYPES[dtype],
            communicator.rank_ops(Ops()),
            communicator,
            config.enable_expert_parallel,
            model.quantization,
        )
    if not _has("triton"):
        raise StartupFailed("a GPU engine needs Triton", hint="pip install 'baton-serve[gpu]'")
    from ...kernels.layers.ops_triton import TritonOps

    dtype = model.dtype if config.dtype == "auto" else config.dtype
    if dtype not in _DTYPES:
        raise StartupFailed(f"the checkpoint is in {dtype}", hint="--dtype bfloat16")
    device = torch.device("cuda:0" if config.device in ("auto", "cuda") else config.device)
    torch.cuda.set_device(device)
    return Placement(
        device,
        _DTYPES[dtype],
        communicator.rank_ops(TritonOps()),
        communicator,
        config.enable_expert_parallel,
        model.quantization,
        _has_kernels(device, model.quantization, dtype),
    )


def _has_kernels(device: torch.device, quantization: Quantization | None, dtype: str) -> bool:
    """Whether there are kernels for weights of this quantisation, in models of `dtype`."""
    needed = _INT4_CAPABILITY if quantization and quantization.int4 else _FP8_CAPABILITY
    is_able = torch.cuda.get_device_capability(device) >= needed
    return stays_packed(quantization, dtype) and is_able


def _check_gpu(device: str, num_gpus: int) -> None:
    """`device` is cuda, or cuda:N as --gpus N gives it."""
    if not num_gpus:
        raise StartupFailed(
            "torch sees no GPU here: --gpus and --device cuda need one", hint="--device cpu"
        )
    index = torch.device(device).index
    if index is not None and index >= num_gpus:
        raise StartupFailed(
            f"--gpus {index}: this host has GPUs 0 to {num_gpus - 1}", hint="nvidia-smi -L"
        )


def choose_kv_dtype(config: EngineConfig, model: ModelConfig, placement: Placement) -> torch.dtype:
    """The type of the KV pool that `--kv-cache-dtype` selects. Raises StartupFailed if the device
    or the model does not support it."""
    wanted = config.kv_cache_dtype
    if wanted == "auto":
        return placement.dtype
    if model.head_dim % SCALE_BYTES:
        raise StartupFailed(
            f"--kv-cache-dtype {wanted} with heads of {model.head_dim} dimensions: their number "
            f"must be a multiple of {SCALE_BYTES}",
            hint="--kv-cache-dtype auto",
        )
    if placement.device.type == "cuda" and wanted == "fp8":
        capability = torch.cuda.get_device_capability(placement.device)
        if capability < _FP8_CAPABILITY:
            raise StartupFailed(
                f"--kv-cache-dtype fp8 on {torch.cuda.get_device_name(placement.device)}, whose "
                f"compute capability is {capability[0]}.{capability[1]}: fp8 needs 8.9",
                hint="--kv-cache-dtype int8",
            )
    return _KV_DTYPES[wanted]


def choose_attention(
    config: EngineConfig, model: ModelConfig, placement: Placement, max_model_len: int
) -> str:
    """The attention backend of prefill: "torch", "triton" or "flashinfer". Decodes on a GPU use our
    own kernel, which reads KV as fast as FlashInfer's and needs no plan.

    The default is FlashInfer's FA3 if it supports the model. Raises StartupFailed if the configured
    backend does not.
    """
    wanted = config.attention_backend
    if placement.device.type == "cpu":
        if wanted not in ("auto", "torch"):
            raise StartupFailed(
                f"--attention-backend {wanted} needs a GPU", hint="--attention-backend torch"
            )
        return "torch"
    if wanted == "torch":
        raise StartupFailed("--attention-backend torch is for CPUs", hint="leave the flag out")
    why_not = _why_not_flashinfer(model, placement, max_model_len)
    if wanted == "flashinfer" and why_not:
        raise StartupFailed(
            f"--attention-backend flashinfer: {why_not}", hint="--attention-backend triton"
        )
    if wanted == "auto":
        return "triton" if why_not else "flashinfer"
    return wanted


def _why_not_flashinfer(model: ModelConfig, placement: Placement, max_model_len: int) -> str:
    """Empty if FlashInfer can compute this."""
    if not _has("flashinfer"):
        return "it is not installed"
    if placement.dtype == torch.float32:
        return "it does not support float32"
    if window := model.smallest_window(max_model_len):
        return f"it is used without sliding windows, and this model has one of {window} tokens"
    if model.head_dim not in _FLASHINFER_HEAD_DIMS:
        return f"it does not support heads of {model.head_dim} dimensions"
    return ""


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
