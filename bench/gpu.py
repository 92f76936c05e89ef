"""What one GPU gives through the real engine: scheduler, runner and sampler, beside its floors.

python -m baton.bench.gpu [--shape NAME] [--growth] [--load] [--out FILE] [flags of the engine]

A decode's context is reserved and started as a hand-off would do it, over KV of random numbers, so
no prefill is waited for. A step is timed by the wall in steady state, its time on the GPU by
events around the replayed graph.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from baton.core.config import EngineConfig
from baton.core.request import Request, SamplingParams
from baton.engine.checkpoint import LoadProgress
from baton.engine.cuda_graphs import DecodeGraph
from baton.engine.local import LocalEngine
from baton.engine.runner import ModelRunner

from .figures import ROOT, Figure, commit, machine, table
from .gpu_shapes import BYTES_PER_S, FLOPS, SHAPES, Shape

_WARMUP_STEPS, _STEPS, _REPEATS = 6, 12, 5
# What the project wants on an H200 with the 8B shape, in ms.
_TARGETS = {
    "decode 1 x 1024": 4.3,
    "decode 64 x 4096": 12.8,
    "decode 256 x 1024": 15.2,
    "prefill 1 x 1024": 24.5,
    "prefill 1 x 8192": 207.0,
    "prefill 16 x 512": 180.0,
}
_DECODES = [(1, 1024), (64, 4096), (256, 1024)]
_PREFILLS = [(1, 1024), (1, 8192), (16, 512)]
_GROWTH = [(batch, 1024) for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)] + [
    (16, context) for context in (256, 2048, 4096, 8192, 16_384, 32_768)
]


class GraphClock:
    """Events around every replay of a decode graph, while it is entered."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._replay = DecodeGraph.replay

    def __enter__(self) -> GraphClock:
        def replay(graph: DecodeGraph) -> None:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._replay(graph)
            pair[1].record()
            self._events.append(pair)

        DecodeGraph.replay = replay  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        DecodeGraph.replay = self._replay  # type: ignore[method-assign]

    def median_ms(self) -> float:
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in self._events)


class Bench:
    """One engine under measurement."""

    def __init__(self, shape: Shape, local: LocalEngine) -> None:
        self._shape = shape
        self._engine = local.engine
        self._rng = random.Random(0)
        self._num_requests = 0
        local.runner.kv.tensor.normal_()

    def _request(self, num_tokens: int, max_tokens: int) -> Request:
        self._num_requests += 1
        prompt = tuple(self._rng.randrange(self._shape.vocab) for _ in range(num_tokens))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Request(f"{self._num_requests:032x}", 0, prompt, sampling)

    def prefill(self, num_prompts: int, num_tokens: int) -> Figure:
        """Time to first token of prompts that arrive together at an idle engine."""
        engine, samples = self._engine, []
        for _ in range(1 + _REPEATS):
            for request in [self._request(num_tokens, 1) for _ in range(num_prompts)]:
                engine.add(request)
            begin_s = time.perf_counter()
            while engine.has_work:
                engine.step()
            samples.append((time.perf_counter() - begin_s) * 1e3)
        name = f"prefill {num_prompts} x {num_tokens}"
        floor_ms = self._shape.prefill_floor_ms(num_prompts, num_tokens)
        return self._figure(name, samples[1:], floor_ms)

    def decode(self, batch: int, context: int) -> tuple[Figure, Figure]:
        """(wall time a step, time of a step that is not on the GPU)."""
        engine = self._engine
        requests = [self._request(context - _WARMUP_STEPS, 200) for _ in range(batch)]
        for request in requests:
            reservation = engine.reserve(request)
            assert reservation is not None, "the pool is too small for this"
            engine.start(reservation, token_id=5)
        with GraphClock() as clock:
            for _ in range(_WARMUP_STEPS):
                engine.step()
            samples = [self._step_ms(batch) for _ in range(_REPEATS)]
        for request in requests:
            engine.abort(request.key)
        while engine.has_work:
            engine.step()
        name = f"decode {batch} x {context}"
        off_gpu = tuple(sample - clock.median_ms() for sample in samples)
        return (
            self._figure(name, samples, self._shape.decode_floor_ms(batch, context)),
            Figure(f"{name}: off the GPU", "ms", off_gpu, 0.0, target=0.03 * min(samples)),
        )

    def _step_ms(self, batch: int) -> float:
        begin_s = time.perf_counter()
        for _ in range(_STEPS):
            assert len(self._engine.step().tokens) == batch
        return (time.perf_counter() - begin_s) / _STEPS * 1e3

    def _figure(self, name: str, samples: list[float], floor_ms: float) -> Figure:
        target = _TARGETS.get(name) if self._shape.name == "llama-3.1-8b" else None
        return Figure(name, "ms", tuple(samples), floor_ms, "bytes and operations", target)


def start_up(config: EngineConfig, folder: Path, runner: ModelRunner) -> tuple[Figure, Any]:
    """Seconds until an engine is ready whose weights lie in the page cache; its notes."""
    _write_checkpoint(folder, runner)
    runner.close()
    progress: list[LoadProgress] = []
    begin_s = time.perf_counter()
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    loaded = ModelRunner(EngineConfig(**(fields | {"load_format": "auto"})), progress.append)
    seconds = time.perf_counter() - begin_s
    floor_s = progress[-1].total_bytes / 55e9
    figure = Figure("start to ready", "s", (seconds,), floor_s, "weights over PCIe", target=25.0)
    loaded.close()
    return figure, loaded.startup_notes


def _write_checkpoint(folder: Path, runner: ModelRunner) -> None:
    """The runner's weights as safetensors, each tensor in a file of its layer."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in runner.model.targets():
        parts = name.split(".")
        part = parts[2] if parts[1] == "layers" else "rest"
        files.setdefault(f"part-{part}.safetensors", {})[name] = tensor.detach().cpu().clone()
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, tensors in files.items():
        save_file(tensors, folder / file)


def main(argv: list[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--growth", action="store_true", help="decode over batch and context")
    parser.add_argument("--load", action="store_true", help="start-up from a written checkpoint")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--commit", default=None, help="what is measured, where git does not know")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu.json")
    arguments = parser.parse_args(argv)
    shape = SHAPES[arguments.shape]
    folder = shape.write_config(Path(tempfile.mkdtemp(prefix="baton-shape-")))
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        load_format="dummy",
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        attention_backend=arguments.attention_backend,
    )
    runner = ModelRunner(config)
    print("\n".join(runner.startup_notes))
    bench = Bench(shape, LocalEngine(config, runner))
    figures = [bench.prefill(*one) for one in _PREFILLS]
    for one in dict.fromkeys([*_DECODES, *(_GROWTH if arguments.growth else [])]):
        figures += bench.decode(*one)
    notes = list(runner.startup_notes)
    if arguments.load:
        figure, notes = start_up(config, folder, runner)
        figures.append(figure)
    print(table(figures))
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": arguments.commit or commit(),
        "command": f"python -m baton.bench.gpu {' '.join(argv)}".strip(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "shape": shape.name,
        "floors_from": {"bytes_per_s": BYTES_PER_S, "flops": FLOPS},
        "start_up": notes,
        "figures": [figure.as_dict() for figure in figures],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
