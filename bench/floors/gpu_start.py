"""Seconds from a process start until its engine is ready, with the weights in the page cache.

Run as a module, this file is that process: it prints as JSON when each part was ready. The first
start finds no compiled Triton kernel, the second finds all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from baton.core.engine_config import EngineConfig
from baton.engine.execution.runner import ModelRunner
from baton.engine.model.decoder import Decoder

from .figures import Figure

_PCIE_BYTES_PER_S = 55e9
_TARGET_S = 25.0


def write_checkpoint(folder: Path, model: Decoder) -> int:
    """Save the model's weights as safetensors, one file per layer; returns their size in bytes."""
    weight_map: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    num_bytes = 0
    targets = [*model.targets.items()]
    for (name, target), following in zip(targets, [*targets[1:], None], strict=True):
        tensors[name] = target.tensor.cpu()
        weight_map[name] = f"part-{_part(name)}.safetensors"
        num_bytes += target.tensor.nbytes
        if following is None or _part(following[0]) != _part(name):
            save_file(tensors, folder / weight_map[name])
            tensors = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return num_bytes


def _part(name: str) -> str:
    """The file of a tensor: its layer, or the tensor's own name outside layers."""
    parts = name.split(".")
    return f"{int(parts[2]):03}" if parts[1] == "layers" else "-".join(parts)


def start_up(folder: Path, num_bytes: int, attention_backend: str) -> tuple[list[Figure], Any]:
    """(seconds of the first and the second start, the report of each)."""
    figures, output = [], []
    with tempfile.TemporaryDirectory(prefix="baton-triton-") as cache:
        for name in ("first start to ready", "start to ready"):
            begin_s = time.perf_counter()
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "baton.bench.floors.gpu_start",
                    str(folder),
                    attention_backend,
                ],
                env=os.environ | {"TRITON_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.perf_counter() - begin_s
            assert done.returncode == 0, done.stderr
            floor_s = num_bytes / _PCIE_BYTES_PER_S
            target = _TARGET_S if name == "start to ready" else None
            figures.append(Figure(name, "s", (seconds,), floor_s, "weights over PCIe", target))
            output.append(json.loads(done.stdout.splitlines()[-1]))
    return figures, output


def main(argv: list[str]) -> int:
    """Start an engine over the model in argv[0] and print how long it took."""
    imported_s = time.perf_counter()
    folder, attention_backend = argv
    runner = ModelRunner(
        EngineConfig(
            model=folder,
            device="cuda",
            max_num_batched_tokens=8192,
            attention_backend=attention_backend,
        )
    )
    seconds = time.perf_counter() - imported_s
    print(json.dumps([f"behind the imports: {seconds:.1f} s", *runner.startup_notes]), flush=True)
    os._exit(0)  # the shutdown is not measured


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
