"""The part of a model that one rank holds: the arithmetic of tensor parallelism.

    heads         0 1 | 2 3 | 4 5 | 6 7      4 ranks, 8 heads, 2 KV heads: a KV head is on all
    KV heads       0  |  0  |  1  |  1       ranks whose heads use it
    vocabulary    ceil(vocab / 4) rows each, on the last ranks partly padding
    experts       a part of each inner dimension; whole experts with --enable-expert-parallel

Knows no tensor and no process.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import StartupFailed
from .model_config import ModelConfig
from .quantization import BLOCK, BLOCK_SCALED
from .weights.int4_layout import NUMBERS_OF_WORD


@dataclass(frozen=True, slots=True)
class Heads:
    """One rank's attention heads, and the KV heads that they use."""

    first_head: int
    num_heads: int
    first_kv_head: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs [first, first + count) of the `full` ones of the checkpoint's projection `name`."""

    name: str
    count: int
    first: int
    full: int


def heads_of_rank(config: ModelConfig, rank: int, size: int) -> Heads:
    """The heads of one of `size` ranks, for a model that `check_divisible` accepts."""
    num_heads = config.num_heads // size
    first_kv_head = rank * config.num_kv_heads // size
    num_kv_heads = max(1, config.num_kv_heads // size)
    return Heads(rank * num_heads, num_heads, first_kv_head, num_kv_heads)


def check_divisible(
    config: ModelConfig,
    size: int,
    *,
    has_expert_parallel: bool = False,
    stays_quantised: bool = False,
) -> None:
    """Raise StartupFailed, naming both numbers, if `size` ranks cannot share the model.

    `has_expert_parallel`: each rank gets some experts whole. `stays_quantised`: weights are not
    dequantised as they are loaded.
    """
    if has_expert_parallel and config.experts is None:
        raise StartupFailed(f"--enable-expert-parallel: {config.architecture} has no experts")

    def why_not(size: int) -> str:
        why = _why_not_even(config, size, has_expert_parallel)
        if why or size == 1:
            return why
        return _why_not_quantised(
            config, size, has_expert_parallel=has_expert_parallel, stays_quantised=stays_quantised
        )

    if why := why_not(size):
        others = " or ".join(str(n) for n in range(1, size) if not why_not(n))
        raise StartupFailed(f"--tensor-parallel-size {size} {why}", hint=f"--tp {others}")


def _why_not_even(config: ModelConfig, size: int, has_expert_parallel: bool) -> str:
    """Why `size` ranks cannot have equal parts of the model; empty if they can."""
    counts, experts = {"num_attention_heads": config.num_heads}, config.experts
    if experts is not None:
        if has_expert_parallel:
            counts["num_experts"] = experts.num_experts
        else:
            counts["moe_intermediate_size"] = experts.intermediate_size
    for name, count in (counts | _inner_sizes(config)).items():
        if count % size:
            return f"does not divide the model's {name} of {count}"
    kv_heads = config.num_kv_heads
    if kv_heads % size and size % kv_heads:
        return f"neither divides the model's {kv_heads} KV heads nor is a multiple of them"
    return ""


def _why_not_quantised(
    config: ModelConfig, size: int, *, has_expert_parallel: bool, stays_quantised: bool
) -> str:
    """Why a rank's part would split a block of weights that shares a scale, or a group or word of
    int4 in a checkpoint; empty if it would not."""
    quantization, inners = config.quantization, _inner_sizes(config)
    if quantization is None:
        return ""
    what, unit, unit_of_outputs = "blocks", BLOCK, BLOCK
    if quantization.int4 is not None and quantization.scale_suffix is not None:
        what, unit, unit_of_outputs = "groups", quantization.int4.unit, NUMBERS_OF_WORD
    elif quantization.scaling != BLOCK_SCALED or not stays_quantised:
        return ""
    if config.experts is not None and not has_expert_parallel:
        inners["moe_intermediate_size"] = config.experts.intermediate_size
    heads = config.num_heads // size * config.head_dim
    kv_heads = max(1, config.num_kv_heads // size) * config.head_dim
    parts = {"heads": (heads, unit), "KV heads": (kv_heads, unit_of_outputs)}
    parts |= {name: (count // size, unit) for name, count in inners.items()}
    for name, (count, divisor) in parts.items():
        if count % divisor:
            return f"splits the weights' {what} of {divisor}: {count} of the {name} per rank"
    return ""


def _inner_sizes(config: ModelConfig) -> dict[str, int]:
    """The inner dimensions of all MLPs but the routed experts."""
    sizes, experts = {"intermediate_size": config.intermediate_size}, config.experts
    if experts is not None and experts.shared_intermediate_size is not None:
        sizes["shared_expert_intermediate_size"] = experts.shared_intermediate_size
    return sizes
