"""Builds the experts of a layer: two stacked weights, with views under the names of checkpoints.

    published checkpoints    three matrices for each expert
    transformers 5           two tensors for all experts of a layer

Knows no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....kernels.experts.experts import LayerLoads, Mixture
from ..experts import Experts, SharedExpert
from ..model_config import ExpertsConfig
from ..weights.placement import Placement
from ..weights.targets import TensorCut
from .layers import make_float_weight, make_mlp

_MERGED_PART = "mlp"
_MERGED_GATE_UP, _MERGED_DOWN = "experts.gate_up_proj", "experts.down_proj"


def is_merged_name(name: str) -> bool:
    """Whether a checkpoint with this tensor name stores all experts of a layer in one tensor."""
    return name.endswith(f".{_MERGED_GATE_UP}")


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's experts [first, first + count), and its part [first_inner, first_inner + inner) of
    their inner dimension."""

    first: int
    count: int
    first_inner: int
    inner: int


def _share_of_rank(config: ExpertsConfig, placement: Placement) -> _Share:
    ranks, count, inner = placement.communicator, config.num_experts, config.intermediate_size
    if placement.has_expert_parallel:
        count //= ranks.size
        return _Share(ranks.rank * count, count, 0, inner)
    inner //= ranks.size
    return _Share(0, count, ranks.rank * inner, inner)


def make_experts(
    layer: str,
    hidden: int,
    config: ExpertsConfig,
    placement: Placement,
    loads: LayerLoads | None,
) -> Experts:
    """`layer`: the prefix of the layer's weight names."""
    prefix, of_all = f"{layer}.{config.part}", placement.of_model()  # all but the routed experts
    router = make_float_weight(f"{prefix}.gate", config.num_experts, hidden, of_all)
    share, names = _share_of_rank(config, placement), _published_names(prefix, config)
    gate_up, down = placement.expert_weights(
        names[0] + names[1], names[2], share.count, hidden, share.inner
    )
    per_token, is_normed = config.num_experts_per_token, config.has_normed_weights
    mixture = Mixture(router, gate_up, down, per_token, is_normed, share.first)
    shared: SharedExpert | None = None
    if (inner := config.shared_intermediate_size) is not None:
        mlp = make_mlp(f"{prefix}.shared_expert", hidden, inner, of_all)
        shared = SharedExpert(
            mlp, make_float_weight(f"{prefix}.shared_expert_gate", 1, hidden, of_all)
        )
    named = f"{layer}.{_MERGED_PART}" if placement.has_merged_experts else prefix
    for name, target in of_all.targets.items():
        placement.targets[f"{named}{name.removeprefix(prefix)}"] = target
    if placement.has_merged_experts:
        _name_merged(named, names, config, placement, share, mixture)
    else:
        _name_published(names, config, placement, share, mixture)
    return Experts(mixture, shared, loads, placement.ops)


def _published_names(prefix: str, config: ExpertsConfig) -> list[list[str]]:
    """The names of all experts' gate, up and down projections, a list for each kind."""
    experts = range(config.num_experts)
    return [[f"{prefix}.experts.{n}.{name}" for n in experts] for name in config.projections]


def _name_published(
    names: Sequence[Sequence[str]],
    config: ExpertsConfig,
    placement: Placement,
    share: _Share,
    mixture: Mixture,
) -> None:
    """Register three matrices for each expert."""
    inner, first, full = share.inner, share.first_inner, config.intermediate_size
    rows, columns = TensorCut(0, first, full), TensorCut(1, first, full)
    for expert, of_expert in enumerate(zip(*names, strict=True)):
        local = expert - share.first
        is_mine = 0 <= local < share.count
        place = local if is_mine else 0
        gate_up, down = mixture.gate_up.of(place), mixture.down.of(place)
        parts = ((gate_up, rows, 0), (gate_up, rows, inner), (down, columns, 0))
        for name, (weight, cut, start) in zip(of_expert, parts, strict=True):
            num_rows = inner if weight is gate_up else len(down)
            if not is_mine:  # on another rank: nothing is read
                cut, start, num_rows = TensorCut(0, 0, num_rows), 0, 0
            target = placement.target(name, weight, cut, start, num_rows)
            placement.targets[f"{name}.weight"] = target


def _name_merged(
    part: str,
    names: Sequence[Sequence[str]],
    config: ExpertsConfig,
    placement: Placement,
    share: _Share,
    mixture: Mixture,
) -> None:
    """Register two tensors for all experts."""
    first, full = share.first_inner, config.intermediate_size
    gate_up_cut, down_cut = TensorCut(1, first, 2 * full, pieces=2), TensorCut(2, first, full)
    if share.count < config.num_experts:
        gate_up_cut = down_cut = TensorCut(0, share.first, config.num_experts)
    for name, of_experts, weights, cut in (
        (_MERGED_GATE_UP, names[0], mixture.gate_up, gate_up_cut),
        (_MERGED_DOWN, names[2], mixture.down, down_cut),
    ):
        target = placement.merged_target(of_experts, weights, cut)
        placement.targets[f"{part}.{name}"] = target
