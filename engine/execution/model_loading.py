"""A model with its weights in place: checked against the checkpoint, then loaded."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch

from ...core.engine_config import EngineConfig
from ...core.errors import StartupFailed
from ...kernels.experts.experts import ExpertLoads
from ..kv.block_pool import NUM_RESERVED_BLOCKS
from ..model.construction.decoder import make_decoder
from ..model.construction.experts import is_merged_name
from ..model.decoder import Decoder
from ..model.model_config import ARCHITECTURES, ModelConfig
from ..model.stages import LayerRange
from ..model.weights.checkpoint import check_weights, load_weights, tensor_names
from ..model.weights.dummy_weights import fill_dummy_weights
from ..model.weights.filling import OnProgress
from ..model.weights.placement import Placement
from ..model.weights.weight_files import weights_identity

# Tokens that differ more than what attention adds to all of them choose different experts.
_DUMMY_STDS = {"model.embed_tokens.weight": 8.0}


def load_model(
    config: EngineConfig,
    model_dir: Path,
    model_config: ModelConfig,
    layers: LayerRange,
    placement: Placement,
    on_progress: OnProgress | None,
    notes: list[str],
) -> tuple[Decoder, str]:
    """The model's `layers` with their weights, and what identifies all weights; `notes` are lines
    for people.

    Raises StartupFailed.
    """
    begin_s, is_dummy = time.perf_counter(), config.load_format == "dummy"
    try:
        if not is_dummy:
            placement = _as_checkpoint(placement, model_dir)
        ignored = _check(model_dir, model_config, placement, is_dummy)
        if len(layers) < model_config.num_layers and not is_dummy:
            ignored |= tensor_names(model_dir)  # those of the other stages
        loads = _expert_loads(config, model_config, placement)
        model = make_decoder(model_config, placement, loads, layers)
        if is_dummy:
            fill_dummy_weights(
                model.targets,
                std=model_config.initializer_range,
                seed=config.seed,
                stds=_DUMMY_STDS if model_config.experts else {},
                on_progress=on_progress,
            )
            identity = f"dummy:{config.seed}"
        else:
            load_weights(model_dir, model.targets, ignored=ignored, on_progress=on_progress)
            identity = weights_identity(model_dir)
    except torch.OutOfMemoryError as error:
        raise StartupFailed(
            f"the weights do not fit into GPU memory: {error}",
            hint="use another GPU, or --dtype bfloat16",
        ) from error
    if placement.device.type == "cuda":
        torch.cuda.synchronize()
    num_bytes = sum(target.nbytes for target in model.targets.values())
    seconds = time.perf_counter() - begin_s
    notes.append(
        f"weights: {num_bytes / 1e9:.1f} GB in {seconds:.1f} s, "
        f"{num_bytes / seconds / 1e9:.1f} GB/s"
    )
    if quantization := model_config.quantization:
        stays = "" if placement.stays_quantised else ", dequantised as they were loaded"
        notes.append(f"{quantization.name}{stays}")
    return model, identity


def check_checkpoint(model_dir: Path, model_config: ModelConfig) -> None:
    """Check by the files' headers that a start would find all weights; loads none.

    Raises StartupFailed.
    """
    placement = Placement(
        torch.device("meta"), torch.float32, quantization=model_config.quantization
    )
    _check(model_dir, model_config, _as_checkpoint(placement, model_dir), False)


def _as_checkpoint(placement: Placement, model_dir: Path) -> Placement:
    """The placement for the names of weights in the checkpoint."""
    is_merged = any(map(is_merged_name, tensor_names(model_dir)))
    return dataclasses.replace(placement, has_merged_experts=is_merged)


def _check(
    model_dir: Path, model_config: ModelConfig, placement: Placement, is_dummy: bool
) -> frozenset[str]:
    """Check that the checkpoint fills this model, before memory is allocated. Returns the further
    tensors that it may have."""
    model = make_decoder(model_config, dataclasses.replace(placement, device=torch.device("meta")))
    ignored = frozenset({"lm_head.weight"} if model_config.has_tied_embeddings else ())
    if (prefix := ARCHITECTURES[model_config.architecture].mtp_prefix) and not is_dummy:
        ignored |= {name for name in tensor_names(model_dir) if name.startswith(f"{prefix}.")}
    if quantization := model_config.quantization:
        names = [name.removesuffix(".weight") for name, t in model.targets.items() if t.quantised]
        ignored |= quantization.ignored(names)
    if not is_dummy:
        check_weights(model_dir, model.targets, ignored=ignored)
    return ignored


def _expert_loads(
    config: EngineConfig, model_config: ModelConfig, placement: Placement
) -> ExpertLoads | None:
    experts = model_config.experts
    if experts is None:
        return None
    first_slot = NUM_RESERVED_BLOCKS * config.kv_block_size
    return ExpertLoads(len(experts.layers), experts.num_experts, first_slot, placement.device)


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The context length of an engine, in tokens. Raises StartupFailed if the model has less."""
    if config.max_model_len is None:
        return model.max_position_embeddings
    if not 0 < config.max_model_len <= model.max_context_tokens:
        raise StartupFailed(
            f"--max-model-len {config.max_model_len}: "
            f"the model's context has {model.max_context_tokens} tokens"
        )
    return config.max_model_len
