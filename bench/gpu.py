"""One GPU through the real engine (scheduler, runner, sampler), beside its floors.

python -m baton.bench.gpu [--shape NAME] [--tp N] [--pp N] [--part-of N] [--only NAME...]
                          [--growth] [--load] [--quantization fp8|fp8-block|int4]
                          [--kv-cache-dtype fp8]

A decode's context is reserved and started as after a hand-off, over KV of random tokens, so no
prefill is needed. A step is timed by wall clock in steady state, its time on the GPU by events
around the replayed graph. A prefill is timed on an idle engine, a second after the previous one;
back to back, the card's power limit slows it down, which is a figure of its own. Queued: many
batches of prompts arrive at once, so that filling and draining a pipeline matters little.

A decode step of an engine with stages is the time in which each sequence gets a token.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.gpu.cuda_graphs import StepGraph
from baton.engine.local import LocalEngine
from baton.kernels.sampling.sample_spec import SampleSpec

from .floors.figures import ROOT, Figure, command_line, commit, machine, table
from .floors.gpu_shapes import FLOPS, LINK_BYTES_PER_S, SHAPES, Shape, bytes_per_s
from .floors.gpu_start import start_up, write_checkpoint

_WARMUP_STEPS, _STEPS, _REPEATS = 6, 12, 5
_NUM_KERNELS, _NAME_CHARS = 20, 80
_QUEUED_BATCHES, _QUEUED_REPEATS = (8, 20), 3
_PAUSE_S = 1.0  # lets the card cool down after a prefill
# The project's targets on an H200 with the 8B shape, in ms.
_TARGETS = {
    "decode 1 x 1024": 4.3,
    "decode 64 x 4096": 12.8,
    "decode 256 x 1024": 15.2,
    "decode 64 x 2048 beside 256 behind 1024": 13.0,
    "decode 64 x 2048 beside 512 behind 1024": 19.0,
    "decode 64 x 2048 beside 256 behind 8192": 15.0,
    "decode 64 x 2048 beside 512 behind 8192": 23.0,
    "prefill 1 x 1024": 24.5,
    "prefill 1 x 8192": 207.0,
    "prefill 16 x 512": 180.0,
}
_TARGETS_OF_EXPERTS = {
    "decode 1 x 1024": 2.6,
    "decode 64 x 4096": 23.5,
    "decode 256 x 1024": 25.0,
    "prefill 1 x 1024": 30.0,
    "prefill 1 x 8192": 132.0,
    "prefill 16 x 512": 100.0,
}
_TARGETS_OF_EXPERTS_IN_FP8 = {
    "decode 1 x 1024": 2.2,
    "decode 64 x 4096": 15.8,
    "decode 256 x 1024": 17.0,
    "prefill 1 x 1024": 28.0,
    "prefill 1 x 8192": 110.0,
    "prefill 16 x 512": 80.0,
}
_TARGETS_IN_FP8 = {
    "decode 1 x 1024": 2.6,
    "decode 64 x 4096": 10.9,
    "decode 256 x 1024": 12.5,
    "prefill 1 x 1024": 16.5,
    "prefill 1 x 8192": 128.0,
    "prefill 16 x 512": 100.0,
}
_TARGETS_IN_BLOCKS = _TARGETS_IN_FP8 | {
    "decode 256 x 1024": 12.7,
    "prefill 1 x 1024": 17.5,
    "prefill 1 x 8192": 139.0,
    "prefill 16 x 512": 110.0,
}
_TARGETS_WITH_KV_IN_FP8 = _TARGETS_IN_FP8 | {"decode 64 x 4096": 7.2, "decode 256 x 1024": 9.0}
# Targets on H200s, by shape, quantisation, KV cache dtype and number of GPUs.
_TARGETS_OF = {
    ("llama-3.1-8b", None, "auto", 1): _TARGETS,
    ("llama-3.1-8b", None, "auto", 2): {"decode 64 x 4096": 7.2},
    ("llama-3.1-70b", None, "auto", 4): {"decode 64 x 2048": 14.5, "prefill 1 x 8192": 540.0},
    ("llama-3.1-8b", "fp8", "auto", 1): _TARGETS_IN_FP8,
    ("llama-3.1-8b", "fp8", "fp8", 1): _TARGETS_WITH_KV_IN_FP8,
    ("llama-3.1-8b", "fp8-block", "auto", 1): _TARGETS_IN_BLOCKS,
    ("llama-3.1-8b", "int4", "auto", 1): {"decode 1 x 1024": 1.8, "decode 64 x 4096": 10.6},
    ("qwen3-30b-a3b", None, "auto", 1): _TARGETS_OF_EXPERTS,
    ("qwen3-30b-a3b", "fp8", "auto", 1): _TARGETS_OF_EXPERTS_IN_FP8,
    ("qwen3-30b-a3b", "fp8-block", "auto", 1): _TARGETS_OF_EXPERTS_IN_FP8,
}
_DECODES = [(1, 1024), (64, 2048), (64, 4096), (256, 1024)]
_PREFILLS = [(1, 128), (1, 512), (1, 1024), (1, 8192), (16, 512)]
_MIXED = [  # decodes, their context, tokens of a prompt chunk, tokens before the chunk
    (64, 2048, 256, 1024),
    (64, 2048, 512, 1024),
    (64, 2048, 256, 8192),
    (64, 2048, 512, 8192),
    (64, 2048, 1024, 8192),
    (256, 1024, 256, 1024),
]
_GROWTH = [(batch, 1024) for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)] + [
    (16, context) for context in (256, 2048, 4096, 8192, 16_384, 32_768)
]


class GraphClock:
    """A context manager that records events around every replay of a decode graph."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._replay = StepGraph.replay

    def __enter__(self) -> GraphClock:
        def replay(graph: StepGraph) -> None:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._replay(graph)
            pair[1].record()
            self._events.append(pair)

        StepGraph.replay = replay  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        StepGraph.replay = self._replay  # type: ignore[method-assign]

    def median_ms(self) -> float:
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in self._events)


class Bench:
    """One engine under measurement."""

    def __init__(
        self,
        shape: Shape,
        local: LocalEngine,
        tp: int,
        num_stages: int,
        kv_dtype: str,
        *,
        tells_kernels: bool,
    ) -> None:
        self._tells_kernels = tells_kernels
        self._kv_dtype = kv_dtype
        self._shape = shape
        self._tp, self._num_stages = tp, num_stages
        self._engine = local.engine
        self._steps = local.engine._runner
        self._loads = local.runner.model.loads
        self._rng = random.Random(0)
        self._num_requests = 0
        self._fill_pools(local)

    def _fill_pools(self, local: LocalEngine) -> None:
        """Fill all blocks of all ranks with the KV of real tokens, so that nothing is timed over
        zeros."""
        engine, size = self._engine, self._engine.limits.block_size
        request = self._request(8 * size, 2)
        engine.add(request, hold=True)
        while engine.has_work:
            engine.step()
        filled = engine.block_refs(request.key, 0, 8).block_ids.tolist()
        others = [n for n in range(2, engine.limits.num_blocks) if n not in filled]
        for first in range(0, len(others), 128):
            targets = others[first : first + 128]
            local.engine._runner.copy_blocks(
                [(filled[n % 8], target) for n, target in enumerate(targets)]
            )
        engine.abort(request.key)

    def _request(self, num_tokens: int, max_tokens: int) -> Request:
        """Models with experts sample: greedy tokens of random weights are few, and would choose few
        experts."""
        self._num_requests += 1
        prompt = tuple(self._rng.randrange(self._shape.vocab) for _ in range(num_tokens))
        temperature = 0.0 if self._loads is None else 1.0
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, ignore_eos=True, seed=self._num_requests
        )
        return Request(f"{self._num_requests:032x}", 0, prompt, sampling)

    def prefill(self, num_prompts: int, num_tokens: int) -> Iterator[Figure]:
        """Time to compute prompts that arrive together: on an idle engine, back to back, and, for a
        batch of several prompts, per batch in a queue of batches."""
        self._prefill_ms(num_prompts, num_tokens)
        samples = []
        for _ in range(_REPEATS):
            time.sleep(_PAUSE_S)
            samples.append(self._prefill_ms(num_prompts, num_tokens))
        in_a_row = [self._prefill_ms(num_prompts, num_tokens) for _ in range(_REPEATS)]
        name = f"prefill {num_prompts} x {num_tokens}"
        if self._tells_kernels:
            self._print_kernels(name, lambda: self._prefill_ms(num_prompts, num_tokens))
        floor_ms = self._shape.prefill_floor_ms(num_prompts, num_tokens)
        num_summed = num_prompts * num_tokens
        yield self._figure(name, samples, floor_ms, num_summed)
        yield self._figure(f"{name}, back to back", in_a_row, floor_ms, num_summed)
        for num_batches in _QUEUED_BATCHES if num_prompts > 1 else ():
            num_queued = num_batches * num_prompts
            queued = [
                self._prefill_ms(num_queued, num_tokens) / num_batches
                for _ in range(_QUEUED_REPEATS)
            ]
            yield self._figure(f"{name}, of {num_batches} queued", queued, floor_ms, num_summed)

    def _prefill_ms(self, num_prompts: int, num_tokens: int) -> float:
        engine = self._engine
        requests = [self._request(num_tokens, 1) for _ in range(num_prompts)]
        begin_s = time.perf_counter()
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
        return (time.perf_counter() - begin_s) * 1e3

    def decode(self, batch: int, context: int) -> list[Figure]:
        """Wall time of a step, the part of it that is not on the GPU, and the experts that it
        activates."""
        engine = self._engine
        requests = [self._request(context - _WARMUP_STEPS, 200) for _ in range(batch)]
        for request in requests:
            engine.reserve(request)
            reservation = engine.next_reservation()
            assert reservation is not None, "the pool is too small for this"
            # Different tokens choose different experts.
            engine.start(reservation, token_id=self._rng.randrange(self._shape.vocab))
        with GraphClock() as clock:
            for _ in range(_WARMUP_STEPS):
                engine.step()
            samples = [self._step_ms(batch) for _ in range(_REPEATS)]
        if self._tells_kernels:
            self._print_kernels(f"decode {batch} x {context}", self._engine.step)
        name = f"decode {batch} x {context}"
        touched = self._touched(name, batch)
        for request in requests:
            engine.abort(request.key)
        while engine.has_work:
            engine.step()
        parts = self._num_stages  # each stage reads its weights in a step
        floor_ms = parts * self._shape.decode_floor_ms(batch // parts, context)
        figures = [self._figure(name, samples, floor_ms, batch)]
        if self._num_stages == 1:
            off_gpu = tuple(sample - clock.median_ms() for sample in samples)
            target = 0.03 * min(samples)
            figures.append(Figure(f"{name}: off the GPU", "ms", off_gpu, 0.0, target=target))
        return [*figures, *touched]

    def _touched(self, name: str, batch: int) -> list[Figure]:
        """Experts per layer that one more step chooses, beside the expectation of uniform
        routing."""
        if self._loads is None:
            return []
        torch.cuda.synchronize()
        self._loads.tokens.zero_()
        self._engine.step()
        torch.cuda.synchronize()
        by_layer = tuple(map(float, (self._loads.tokens > 0).sum(dim=1).tolist()))
        uniform = self._shape.touched(batch)
        return [Figure(f"{name}: experts touched", "", by_layer, uniform, "uniform routing")]

    def mixed(self, batch: int, context: int, num_tokens: int, prompt_context: int) -> Figure:
        """Wall time of a step with decodes and a prompt chunk. Steps run in sequence, each launched
        while the previous one is on the GPU, directly by the runner without a scheduler."""
        size, limits = self._engine.limits.block_size, self._engine.limits
        longest = max(context, prompt_context + num_tokens) // size + 1
        tables = [
            [self._rng.randrange(2, limits.num_blocks) for _ in range(longest)]
            for _ in range(batch + 1)
        ]
        spec = SampleSpec(SamplingParams(temperature=0.0), key=1)
        step = [
            SequenceSlice((self._rng.randrange(self._shape.vocab),), context - 1, table, spec)
            for table in tables[:batch]
        ]
        prompt = tuple(self._rng.randrange(self._shape.vocab) for _ in range(num_tokens))
        step.append(SequenceSlice(prompt, prompt_context, tables[batch], None))
        samples = []
        for _ in range(_REPEATS + 1):
            begin_s, before = time.perf_counter(), self._steps.launch(step)
            for _ in range(_STEPS - 1):
                launched = self._steps.launch(step)
                before.collect()
                before = launched
            before.collect()
            samples.append((time.perf_counter() - begin_s) / _STEPS * 1e3)
        name = f"decode {batch} x {context} beside {num_tokens} behind {prompt_context}"
        if self._tells_kernels:
            self._print_kernels(name, lambda: self._steps.launch(step).collect())
        floor_ms = self._shape.decode_floor_ms(batch, context)
        return self._figure(name, samples[1:], floor_ms, batch + num_tokens)

    def _step_ms(self, batch: int) -> float:
        """Time for one more token per sequence; with stages, one step of each part of the
        sequences."""
        begin_s, num_tokens = time.perf_counter(), 0
        while num_tokens < _STEPS * batch:
            num_tokens += len(self._engine.step().tokens)
        assert num_tokens == _STEPS * batch
        return (time.perf_counter() - begin_s) / _STEPS * 1e3

    def _print_kernels(self, name: str, step: Callable[[], object]) -> None:
        """Print the kernels of a step on this rank's GPU and how much later each ended than all
        before it: a kernel that is launched early waits for the previous ones."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(_STEPS):
                step()
            torch.cuda.synchronize()
        events = [one for one in profile.events() or () if one.device_type.name == "CUDA"]
        times = [(event.time_range, event.name) for event in events]
        times.sort(key=lambda one: one[0].start)
        counts: Counter[str] = Counter(kernel for _, kernel in times)
        added_us: Counter[str] = Counter()
        before_us = times[0][0].start if times else 0.0
        for span, kernel in times:
            added_us[kernel] += max(0.0, span.end - max(before_us, span.start))
            before_us = max(before_us, span.end)
        print(f"{name}, by kernel:")
        for kernel, us in added_us.most_common(_NUM_KERNELS):
            each = counts[kernel] / _STEPS
            print(f"{us / _STEPS:9.1f} us {each:7.1f} x {kernel[:_NAME_CHARS]}")

    def _figure(self, name: str, samples: list[float], floor_ms: float, num_tokens: int) -> Figure:
        """`floor_ms` is the floor on one GPU."""
        num_gpus = self._tp * self._num_stages
        kind = (self._shape.name, self._shape.quantization, self._kv_dtype, num_gpus)
        has_targets = self._num_stages == 1 and "H200" in torch.cuda.get_device_name()
        targets = _TARGETS_OF.get(kind, {}) if has_targets else {}
        floor_ms /= num_gpus
        floor_ms += self._shape.sums_floor_ms(num_tokens, self._tp)
        bound = "bytes and operations" + (", links" if self._tp > 1 else "")
        return Figure(name, "ms", tuple(samples), floor_ms, bound, targets.get(name))


def chosen(kind: str, cases: list[tuple[int, int]], only: list[str]) -> list[tuple[int, int]]:
    """The selected cases, each once; all cases without `only`."""
    names = {one: f"{kind} {one[0]} x {one[1]}" for one in cases}
    return [one for one, name in names.items() if not only or name in only]


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the engine")
    parser.add_argument("--pp", type=int, default=1, help="stages of the engine, each of --tp GPUs")
    parser.add_argument("--pp-balance", choices=("prefill", "decode"), help="of the stages")
    parser.add_argument("--part-of", type=int, default=1, help="a rank's part of so many, alone")
    parser.add_argument(
        "--quantization", choices=("fp8", "fp8-block", "int4"), help="of the weights"
    )
    parser.add_argument("--only", nargs="*", default=[], help="cases, as 'decode 64 x 4096'; mixed")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--mixed-graph-tokens", type=int, default=1024)
    parser.add_argument("--growth", action="store_true", help="decode over batch and context")
    parser.add_argument("--load", action="store_true", help="start-up from a written checkpoint")
    parser.add_argument("--kernels", action="store_true", help="what steps consist of")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8", "int8"), default="auto")
    parser.add_argument("--commit", default=None, help="what is measured, where git does not know")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu.json")
    arguments = parser.parse_args(argv)
    shape = dataclasses.replace(
        SHAPES[arguments.shape].part(arguments.part_of),
        quantization=arguments.quantization,
        is_kv_8bit=arguments.kv_cache_dtype != "auto",
        bytes_per_s=bytes_per_s(torch.cuda.get_device_name()),
    )
    folder = shape.write_config(Path(tempfile.mkdtemp(prefix="baton-shape-")))
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        load_format="dummy",
        quantization=None if arguments.quantization == "fp8-block" else arguments.quantization,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        attention_backend=arguments.attention_backend,
        kv_cache_dtype=arguments.kv_cache_dtype,
        tensor_parallel_size=arguments.tp,
        pipeline_parallel_size=arguments.pp,
        pp_balance=arguments.pp_balance,
        max_num_seqs=arguments.max_num_seqs,
        mixed_graph_tokens=arguments.mixed_graph_tokens,
    )
    local = LocalEngine.load(config, print)
    runner = local.runner
    print("\n".join(runner.startup_notes), flush=True)
    bench = Bench(
        shape,
        local,
        arguments.tp,
        arguments.pp,
        arguments.kv_cache_dtype,
        tells_kernels=arguments.kernels,
    )
    decodes = [*_DECODES, *(_GROWTH if arguments.growth else [])]
    figures: list[Figure] = []
    for one in chosen("prefill", _PREFILLS, arguments.only):
        figures += bench.prefill(*one)
    for one in chosen("decode", decodes, arguments.only):
        figures += bench.decode(*one)
    notes = list(runner.startup_notes)
    for mixed in _MIXED:
        if not arguments.only or "mixed" in arguments.only:
            figures.append(bench.mixed(*mixed))
    if arguments.load:
        num_bytes = write_checkpoint(folder, runner.model)
        runner.close()
        torch.cuda.empty_cache()
        started, output = start_up(folder, num_bytes, arguments.attention_backend)
        figures += started
        notes += [note for one in output for note in one]
    print(table(figures))
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": arguments.commit or commit(),
        "command": command_line("gpu", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "shape": shape.name,
        "quantization": shape.quantization,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "gpus": arguments.tp * arguments.pp,
        "stages": arguments.pp,
        "floors_from": {
            "bytes_per_s": shape.bytes_per_s,
            "flops": FLOPS,
            "link_bytes_per_s": LINK_BYTES_PER_S,
        },
        "start_up": notes,
        "figures": [figure.as_dict() for figure in figures],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if not arguments.load:
        local.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
