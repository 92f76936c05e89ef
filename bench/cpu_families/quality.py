"""The quality loss of FP8 and int4 weights: the bundled model's perplexity on this repository.

python -m baton.bench.cpu_families.quality [--windows N] [--out FILE]

Computed in float32 on a CPU, in windows; each token is predicted from those before it in its
window. "weights": dequantised as a CPU engine does; "activations": quantised too, as on a GPU. The
text is the Python of core/, which resembles the training data but is not part of it. GPTQ
calibrates on engine/.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from baton.core.model_dir import resolve_model_dir
from baton.engine.model.construction.decoder import make_decoder
from baton.engine.model.decoder import Decoder
from baton.engine.model.model_config import ModelConfig, read_model_config
from baton.engine.model.weights.checkpoint import load_weights
from baton.engine.model.weights.placement import Placement
from baton.kernels.attention.attention import AttentionMetadata
from baton.kernels.attention.attention_torch import TorchAttention
from baton.kernels.layers.ops import Ops
from baton.kernels.products.weights import FP8, FP8_MAX, quantise_blocks

from ..floors.figures import ROOT, Figure, machine, table, write
from .gptq import RecordingOps, quantise, write_checkpoint

_WINDOW, _BLOCK = 512, 16
NUM_WINDOWS = 120  # with 40, the loss of FP8 varies by 0.15 % between texts
_CALIBRATION_WINDOWS = 32
MAX_RATIO, MAX_RATIO_INT4 = 1.005, 1.04  # of the perplexity with unquantised weights
_BY_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_BY_TENSOR = {"quant_method": "fp8"}


def text_windows(count: int, part: str = "core") -> torch.Tensor:
    """Token ids [count, window + 1] of the Python files in folder `part`."""
    texts = [path.read_text() for path in sorted((ROOT / part).rglob("*.py"))]
    tokenizer = Tokenizer.from_file(str(resolve_model_dir("demo") / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode("\n".join(texts)).ids)
    return ids.unfold(0, _WINDOW + 1, _WINDOW)[:count]


def load(
    folder: Path,
    quantization: str | None = None,
    *,
    stays_quantised: bool = False,
    ops: Ops | None = None,
) -> tuple[ModelConfig, Decoder]:
    """Load the model in `folder`; with `stays_quantised`, activations of FP8 models are quantised
    too."""
    config = read_model_config(folder, quantization)
    placement = Placement(
        torch.device("cpu"),
        torch.float32,
        ops or Ops(),
        quantization=config.quantization,
        stays_quantised=stays_quantised,
    )
    model = make_decoder(config, placement)
    load_weights(folder, model.targets)
    return config, model


def perplexity(config: ModelConfig, model: Decoder, windows: torch.Tensor) -> float:
    """Perplexity of each token given those before it in its window."""
    num_blocks = _WINDOW // _BLOCK
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, _BLOCK, config.head_dim)
    attention = TorchAttention(torch.zeros(shape), [None] * config.num_layers)
    positions = torch.arange(_WINDOW)
    losses = []
    with torch.inference_mode():
        for window in windows:
            tables = [list(range(num_blocks))]
            attention.plan(AttentionMetadata([_WINDOW], [_WINDOW], tables, positions, 0))
            hidden = model.forward(window[:-1], positions, positions, attention)
            logits = model.lm_head.project(hidden)
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:]))
    return float(torch.stack(losses).mean().exp())


def quantise_by_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.float().abs().max() / FP8_MAX
    return (weight.float() / scale).to(FP8), scale


def write_fp8(
    folder: Path,
    config: dict[str, Any],
    suffix: str,
    quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Path:
    """Write the bundled model as an FP8 checkpoint."""
    source = resolve_model_dir("demo")
    tensors = load_file(source / "model.safetensors")
    for name in [name for name, one in tensors.items() if ".layers." in name and one.ndim == 2]:
        data, scale = quantise(tensors[name])
        tensors |= {name: data, f"{name.removesuffix('.weight')}.{suffix}": scale}
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return folder


def write_gptq(folder: Path) -> Path:
    """Write the bundled model as a GPTQ checkpoint."""
    demo, ops = resolve_model_dir("demo"), RecordingOps()
    config, model = load(demo, ops=ops)
    windows = text_windows(_CALIBRATION_WINDOWS, "engine")
    made = quantise(model, ops, lambda: perplexity(config, model, windows))
    return write_checkpoint(folder, demo, made)


def measure(num_windows: int = NUM_WINDOWS) -> list[Figure]:
    """Perplexity of the unquantised weights, then of each quantisation."""
    windows, demo = text_windows(num_windows), resolve_model_dir("demo")

    def of(
        folder: Path, quantization: str | None = None, *, stays_quantised: bool = False
    ) -> float:
        loaded = load(folder, quantization, stays_quantised=stays_quantised)
        return perplexity(*loaded, windows)

    plain = of(demo)
    found = {
        "--quantization fp8, weights": of(demo, "fp8"),
        "--quantization fp8, weights and activations": of(demo, "fp8", stays_quantised=True),
    }
    formats = {
        "by block": (_BY_BLOCK, "weight_scale_inv", quantise_blocks),
        "by tensor": (_BY_TENSOR, "weight_scale", quantise_by_tensor),
    }
    for name, form in formats.items():
        with tempfile.TemporaryDirectory(prefix="baton-fp8-") as folder:
            path = write_fp8(Path(folder), *form)
            found[f"{name}, weights"] = of(path)
            found[f"{name}, weights and activations"] = of(path, stays_quantised=True)
    in_int4 = {"--quantization int4, to the nearest": of(demo, "int4")}
    with tempfile.TemporaryDirectory(prefix="baton-gptq-") as folder:
        in_int4["int4 by GPTQ"] = of(write_gptq(Path(folder)))
    limits = (plain * MAX_RATIO, plain * MAX_RATIO_INT4)
    return [
        Figure("weights as they are", "per token", (plain,)),
        *(
            Figure(f"{name}: {value / plain - 1:+.2%}", "per token", (value,), target=limit)
            for limit, values in zip(limits, (found, in_int4), strict=True)
            for name, value in values.items()
        ),
    ]


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/quality.json")
    arguments = parser.parse_args(argv)
    figures = measure(arguments.windows)
    print(table(figures))
    write(arguments.out, {"perplexity": figures}, machine(), "cpu_families.quality")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
