"""The cost of LoRA adapters on one GPU: decode steps with and without adapters, and a new adapter.

python -m baton.bench.decoding.lora [--shape NAME] [--rank N] [--adapters N]

Two engines share the GPU, one of them without `enable_lora`, and take turns: each decodes 64
sequences of 1k tokens without adapters, where both should take equally long, then the other engine
decodes them with 8 adapters of rank 16. Then a new adapter is read while those steps continue: the
time until it is in host memory, and the longest gap between steps until a request decodes with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Adapter, Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine
from baton.engine.lora.layout import AdapterLayout

from ..floors.figures import ROOT, Figure, command_line, commit, machine, table
from ..floors.gpu_shapes import SHAPES

_BATCH, _CONTEXT = 64, 1024
_STEPS, _REPEATS = 20, 5
_MOST_TOKENS = 512  # max_tokens: more than any output gets
_NUM_BLOCKS = 7000
_MOST_OVER, _MOST_OVER_IDLE, _LOAD_S = 0.10, 0.01, 1.0  # the project's targets


def write_adapter(folder: Path, layout: AdapterLayout, rank: int, seed: int) -> Path:
    """A random adapter of all projections, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, projection in layout.projections.items():
        shapes = {"A": (rank, projection.inputs.full), "B": (projection.outputs.full, rank)}
        for half, shape in shapes.items():
            drawn = (torch.randn(shape, generator=generator) * 0.01).bfloat16()
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = drawn
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in layout.projections})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Bench:
    """Decodes whose context is reserved and which start as after a hand-off."""

    def __init__(self, local: LocalEngine) -> None:
        self._engine, self._number = local.engine, 0

    def begin(self, adapters: list[Adapter | None]) -> list[str]:
        """Start one decoding sequence per adapter; returns their keys."""
        sampling = SamplingParams(temperature=0.0, max_tokens=_MOST_TOKENS, ignore_eos=True)
        keys = []
        for adapter in adapters:
            self._number += 1
            prompt = [7 + i % 1000 for i in range(_CONTEXT)]
            request = Request(f"{self._number:032x}", 0, prompt, sampling, adapter=adapter)
            self._engine.reserve(request)
            reservation = self._engine.next_reservation()
            assert reservation is not None, "no room"
            self._engine.start(reservation, 11)
            keys.append(request.key)
        return keys

    def end(self, keys: list[str]) -> None:
        for key in keys:
            self._engine.abort(key)
        while self._engine.has_work:
            self._engine.step()

    def step_ms(self, adapters: list[Adapter | None]) -> float:
        """Milliseconds of one decode step with these adapters, in steady state."""
        keys = self.begin(adapters)
        for _ in range(5):
            self._engine.step()
        begin_s = time.perf_counter()
        for _ in range(_STEPS):
            self._engine.step()
        took_ms = (time.perf_counter() - begin_s) / _STEPS * 1e3
        self.end(keys)
        return took_ms

    def new_adapter(
        self, local: LocalEngine, path: Path, running: list[Adapter | None]
    ) -> list[float]:
        """[seconds to read the adapter, longest gap between steps while it is read in ms, longest
        gap while a request decodes with it in ms, the longer of both over the median gap]"""
        keys, gaps, found = self.begin(running), list[float](), list[float]()
        room, reader = local.engine.adapters, local.runner.adapters
        assert room is not None and reader is not None
        adapters = []

        def read() -> None:
            begin_s = time.perf_counter()
            adapters.append(reader.read(str(path)))
            found.append(time.perf_counter() - begin_s)

        for _ in range(10):
            self._engine.step()
        thread = threading.Thread(target=read)
        thread.start()
        last_s, num_behind, num_reading = time.perf_counter(), 0, 0
        while num_behind < 20:
            self._engine.step()
            now_s = time.perf_counter()
            gaps.append((now_s - last_s) * 1e3)
            last_s = now_s
            if adapters and not num_behind:
                num_reading = len(gaps)
                room.keep(adapters[0])
                keys += self.begin([Adapter("new", adapters[0].digest, str(path))])
            num_behind += bool(adapters)
        thread.join()
        self.end(keys)
        reading, using = max(gaps[:num_reading]), max(gaps[num_reading:])
        longest = max(reading, using) / statistics.median(gaps)
        return [found[0], reading, using, longest]


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "lora.json")
    arguments = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="baton-lora-"))
    config = EngineConfig(
        model=str(SHAPES[arguments.shape].write_config(folder)),
        device="cuda",
        load_format="dummy",
        enable_prefix_caching=False,
        num_kv_blocks=_NUM_BLOCKS,  # two engines fit into 80 GB
        max_model_len=4096,
        max_num_seqs=128,
        enable_lora=True,
        max_loras=arguments.adapters + 1,
        max_lora_rank=arguments.rank,
    )
    without = LocalEngine.load(replace(config, enable_lora=False), print)
    local = LocalEngine.load(config, print)
    layout = AdapterLayout.of(local.runner.model)
    num = arguments.adapters
    paths = [write_adapter(folder / f"{n}", layout, arguments.rank, n) for n in range(num + 1)]
    loaded = [local.load_adapter(str(n), str(path)) for n, path in enumerate(paths[:num])]
    kinds: dict[str, list[Adapter | None]] = {
        "no adapters": [None] * _BATCH,
        f"{num} adapters": [loaded[n % num] for n in range(_BATCH)],
        "half of them with one": [loaded[0] if n % 2 else None for n in range(_BATCH)],
    }
    gc.collect()
    gc.freeze()  # as an engine's process does: collecting all loaded objects would pause the engine
    bench, bench_without = Bench(local), Bench(without)
    samples: dict[str, list[float]] = {name: [] for name in kinds}
    not_enabled = list[float]()
    for _ in range(_REPEATS):
        not_enabled.append(bench_without.step_ms(kinds["no adapters"]))
        for name, adapters in kinds.items():
            samples[name].append(bench.step_ms(adapters))
    base_ms = statistics.median(not_enabled)
    step = f"decode {_BATCH} x {_CONTEXT}"
    figures = [Figure(f"{step}, not enabled", "ms", tuple(not_enabled))]
    for name, each in samples.items():
        most_over = _MOST_OVER_IDLE if name == "no adapters" else _MOST_OVER
        bound_is, target = "without enable_lora", (1 + most_over) * base_ms
        figures.append(Figure(f"{step}, {name}", "ms", tuple(each), base_ms, bound_is, target))
    read_s, reading_ms, using_ms, gap_steps = bench.new_adapter(
        local, paths[num], kinds["no adapters"]
    )
    figures += [
        Figure("new adapter: read", "s", (read_s,), 0.0, target=_LOAD_S),
        Figure("new adapter: longest gap between steps, read", "ms", (reading_ms,), base_ms),
        Figure("new adapter: longest gap between steps, first used", "ms", (using_ms,), base_ms),
        Figure("new adapter: the longer one in steps", "", (gap_steps,), 1.0, target=3.0),
    ]
    print(table(figures))
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "command": command_line("decoding.lora", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "shape": arguments.shape,
        "rank": arguments.rank,
        "figures": [figure.as_dict() for figure in figures],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
