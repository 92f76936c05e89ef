"""Which safetensors files a checkpoint has, and how many bytes its weights will take in memory.

Standard library only: `baton up` uses it before any engine is started. checkpoint.py reads the
tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path

from ....core.engine_config import EngineConfig
from ....core.errors import StartupFailed
from ....core.model_dir import read_json, resolve_model_dir
from ..model_config import ModelConfig, read_model_config
from ..quantization import Quantization, experts_stay_packed, stays_packed
from .int4_layout import NUMBERS_OF_WORD, Int4Layout

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_UNREADABLE = (
    OSError,
    struct.error,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    RecursionError,
)
_BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
_FP8 = "F8_E4M3"
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, sorted; raises StartupFailed if there are none."""
    index = model_dir / _INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or not all(_is_plain_file_name(name) for name in names):
            raise StartupFailed(f"{index} has no weight_map to files beside it")
        paths = tuple(model_dir / name for name in sorted(set(names)))
    else:
        paths = (model_dir / _SINGLE_FILE,)
    for path in paths:
        if not path.is_file():
            raise StartupFailed(f"there is no {path}", hint=_hint_for_no_weights(model_dir))
    return paths


def weights_bytes(config: EngineConfig) -> int:
    """Bytes that the weights of `config.model` take on GPUs, over all ranks, with `--dtype`. Raises
    StartupFailed if there are none or they cannot be read.

    Quantised weights become floats unless `stays_packed`.
    """
    folder = resolve_model_dir(config.model)
    model = read_model_config(folder, config.quantization)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    quantization, packs_experts = model.quantization, _packs_experts(config, model)
    if config.load_format == "dummy":
        counts = [_num_dummy_weights(model, packs_experts)]
    else:
        files = weight_files(folder)
        counts = [_num_weights(path, quantization, packs_experts) for path in files]
    num_bytes = _BYTES_OF.get(dtype, 2)
    is_packed = quantization is not None and stays_packed(quantization, dtype)
    of_quantised = quantization.bytes_per_weight if quantization and is_packed else num_bytes
    return sum(int(floats * num_bytes + quantised * of_quantised) for floats, quantised in counts)


def _packs_experts(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether quantised experts of the sizes on each rank may stay quantised."""
    if model.experts is None or model.quantization is None or model.quantization.int4 is None:
        return True
    ranks = 1 if config.enable_expert_parallel else config.tensor_parallel_size
    return experts_stay_packed(model.hidden_size, model.experts.intermediate_size // ranks)


def _num_weights(
    path: Path, quantization: Quantization | None, packs_experts: bool
) -> tuple[int, int]:
    """The counts (floats, weights that may stay quantised) from the file's header."""
    try:
        with path.open("rb") as file:
            (num_bytes,) = struct.unpack("<Q", file.read(8))
            if num_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {num_bytes} bytes")
            header = json.loads(file.read(num_bytes))
        num_floats = num_quantised = 0
        layout = _int4_layout(quantization)
        for name in header.keys() - {"__metadata__"}:
            shape, dtype = header[name]["shape"], header[name]["dtype"]
            if layout is not None and name.endswith(layout.besides):
                continue
            is_word = layout is not None and name.endswith(layout.numbers.suffix)
            count = math.prod(shape) * (NUMBERS_OF_WORD if is_word else 1)
            is_packed = packs_experts or ".experts." not in name
            if is_packed and _is_quantised(name, len(shape), dtype, quantization):
                num_quantised += count
            else:
                num_floats += count
        return num_floats, num_quantised
    except _UNREADABLE as error:
        hint = "it may be incomplete: download it again"
        raise StartupFailed(f"cannot read {path}: {error}", hint=hint) from error


def _int4_layout(quantization: Quantization | None) -> Int4Layout | None:
    """The layout of a checkpoint's int4 weights, or None."""
    if quantization is None or quantization.int4 is None or quantization.scale_suffix is None:
        return None
    return quantization.int4.layout


def _is_quantised(name: str, num_dims: int, dtype: str, quantization: Quantization | None) -> bool:
    """Whether the tensor's weights may stay quantised."""
    if quantization is None or ".layers." not in name:
        return False
    if layout := _int4_layout(quantization):
        return name.endswith(layout.numbers.suffix)
    # A tensor of three dimensions holds all experts of a layer.
    is_projection = num_dims == 3 or (num_dims == 2 and name.endswith(".weight"))
    if quantization.scale_suffix is None:
        return is_projection and quantization.covers(name.removesuffix(".weight"))
    return is_projection and dtype == _FP8


def _num_dummy_weights(model: ModelConfig, packs_experts: bool) -> tuple[int, int]:
    """The counts (floats, weights that may stay quantised) of the matrices; all other weights are
    less than a thousandth."""
    width, experts = model.hidden_size, model.experts
    attention = 2 * width * model.head_dim * (model.num_heads + model.num_kv_heads)
    floats = (1 if model.has_tied_embeddings else 2) * model.vocab_size * width  # embeddings
    inners = model.num_layers * model.intermediate_size  # of all MLPs and experts
    if experts is not None:
        routed = len(experts.layers) * experts.num_experts * experts.intermediate_size
        shared = experts.shared_intermediate_size or 0
        inners += len(experts.layers) * (shared - model.intermediate_size)
        if packs_experts:
            inners += routed
        else:
            floats += 3 * width * routed
        floats += len(experts.layers) * experts.num_experts * width  # routers
    projections = model.num_layers * attention + 3 * width * inners
    return (floats + projections, 0) if model.quantization is None else (floats, projections)


def _is_plain_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _hint_for_no_weights(model_dir: Path) -> str:
    pickles = [p.name for p in sorted(model_dir.iterdir()) if p.suffix in _PICKLE_SUFFIXES]
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which can run code and is never opened: convert the "
            "checkpoint to safetensors (transformers: model.save_pretrained(DIR))"
        )
    return "download the *.safetensors files, or try --load-format dummy"


def weights_identity(model_dir: Path) -> str:
    """A hex digest that distinguishes checkpoints without reading them whole.

    Of each file: name, size, header (names, types, shapes, offsets) and evenly spread samples.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in weight_files(model_dir):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            digest.update(prefix + file.read(min(header_bytes, size)))
            first = file.tell()
            for i in range(_NUM_SAMPLES):
                file.seek(first + max(0, size - first - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
