"""The schemes beside each other, as a table, a picture and bench/results/baselines.json.

    python -m baton.bench.baselines           the bundled model, this CPU
    python -m baton.bench.baselines --gpu     Llama-3.1-8B's shape with random weights, one GPU

Each scheme serves the same requests twice: all at once, which gives requests/s, and with Poisson
arrivals at a rate that the last scheme sustains, which gives TTFT and TBT. Two engines get twice
the requests at twice the rate; their requests/s are given per engine. Admission policies differ
where outputs outgrow the pool: there prompts are a sixth as long, outputs three times as long, and
the pool is small (`--tight-tokens`). The results file is written after each of these parts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from baton.core import flags
from baton.core.engine_config import EngineConfig
from baton.core.metrics import TokenTimes, percentile
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.kv_memory import CpuKvMemory

from ..floors.figures import ROOT, command_line, commit, machine
from ..floors.gpu_shapes import SHAPES
from .pairs import PAIRS, PairPlayer, PairShape
from .play import Player, warm_up
from .schemes import ADMISSIONS, ON_GPUS, SCHEMES, Scheme
from .workload import Job, WorkShape, make_jobs, poisson

_LOAD = 0.7  # of the throughput of the last scheme
_GPU_SHAPE = "llama-3.1-8b"
_GPU_DEFAULTS: dict[str, Any] = {
    "out": "baselines_gpu",
    "load_format": "dummy",
    "gpu_memory_utilization": 0.6,  # activations of prompts that are not chunked need the rest
    "max_model_len": 8192,
    "block_size": 16,
    "num_requests": 64,
    "scale": 1,
    "longest": 8192,
    "most_outputs": 512,
    "system_tokens": 512,
    "pool_tokens": 131_072,
    "tight_tokens": 16_384,
    "chunk_tokens": 512,
}


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    arguments, measured = _arguments(argv), commit()
    with tempfile.TemporaryDirectory(prefix="baton-shape-") as folder:
        if arguments.gpu:
            arguments.model = str(SHAPES[_GPU_SHAPE].write_config(Path(folder)))
        return _measure(argv, arguments, measured)


def _measure(argv: Sequence[str], arguments: argparse.Namespace, measured: str) -> int:
    config = flags.parse(EngineConfig, arguments)
    runner = ModelRunner(config)
    is_gpu = not isinstance(runner.kv, CpuKvMemory)
    shape = WorkShape(
        arguments.num_requests,
        arguments.scale,
        arguments.scale,
        arguments.longest,
        arguments.most_outputs,
        arguments.system_tokens,
        runner.model_config.vocab_size,
    )
    jobs = make_jobs(shape)
    num_blocks = min(runner.kv.num_blocks, arguments.pool_tokens // config.kv_block_size + 2)
    num_few = min(num_blocks, arguments.tight_tokens // config.kv_block_size + 2)
    player, tight = (
        Player(runner, num, config.kv_block_size, shape.max_len, arguments.chunk_tokens)
        for num in (num_blocks, num_few)
    )
    warm_up(player, jobs, SCHEMES[-1])
    schemes = [*SCHEMES, *(ON_GPUS if is_gpu else ())]
    rows = [_at_once(player, scheme, jobs) for scheme in schemes]
    rate_per_s = _LOAD * rows[-1]["requests_per_s"]
    arrivals_s = poisson(len(jobs), rate_per_s, seed=1)
    chats = make_jobs(
        replace(shape, prompt_scale=shape.prompt_scale * 6, output_scale=shape.output_scale / 3)
    )
    admissions: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "commit": measured,
        "command": command_line("baselines", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "clock": "wall" if is_gpu else "CPU time of the process",
        "model": _GPU_SHAPE if arguments.gpu else runner.model_dir.name,
        "shape": asdict(shape),
        "pool_tokens": (num_blocks - 2) * config.kv_block_size,
        "chunk_tokens": arguments.chunk_tokens,
        **_means(jobs),
        "chats": _means(chats) | {"pool_tokens": (num_few - 2) * config.kv_block_size},
        "rate_per_s": rate_per_s,
        "tbt_ms": arguments.tbt_ms,
        "schemes": rows,
        "admissions": admissions,
    }
    path = ROOT / "bench" / "results" / f"{arguments.out}.json"
    for scheme, row in zip(schemes, rows, strict=True):
        row |= _latencies(player.play(scheme, jobs, arrivals_s).times)
        _show(row)
    _write(path, result)
    for scheme in ADMISSIONS:
        admissions.append(_at_once(tight, scheme, chats))
        _show(admissions[-1])
    _write(path, result)
    rows += _pairs(runner, config, shape, num_blocks, rate_per_s, arguments, is_gpu=is_gpu)
    _write(path, result)
    return 0


def _write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def _pairs(
    runner: ModelRunner,
    config: EngineConfig,
    shape: WorkShape,
    num_blocks: int,
    rate_per_s: float,
    arguments: argparse.Namespace,
    *,
    is_gpu: bool,
) -> list[dict[str, Any]]:
    """The rows of the schemes with two engines."""
    jobs = make_jobs(replace(shape, num_requests=2 * shape.num_requests))
    pair = PairShape(
        num_blocks,
        config.kv_block_size,
        arguments.chunk_tokens,
        arguments.tbt_ms / 1000,
        runner.eos_token_ids[0],
    )
    player = PairPlayer(runner, pair, time.monotonic if is_gpu else time.process_time)
    arrivals_s = poisson(len(jobs), 2 * rate_per_s, seed=1)
    rows = []
    for mode in PAIRS:
        ends_s = [one.token_s[-1] for one in player.play(mode, jobs, [0.0] * len(jobs))]
        row = {"name": mode, "num_engines": 2, "requests_per_s": len(jobs) / 2 / max(ends_s)}
        rows.append(row | _latencies(player.play(mode, jobs, arrivals_s)))
        _show(rows[-1])
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments; with `--gpu` the defaults are real lengths and blocks of full size."""
    parser = _parser()
    if parser.parse_args(argv).gpu:
        parser.set_defaults(**_GPU_DEFAULTS)
    return parser.parse_args(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m baton.bench.baselines")
    numbers = {
        "--num-requests": (60, "requests of each run"),
        "--scale": (12, "divides ShareGPT's lengths"),
        "--longest": (1024, "tokens of prompt and output that a request may have"),
        "--most-outputs": (256, "max_tokens of every request"),
        "--system-tokens": (48, "of the four system prompts"),
        "--pool-tokens": (4096, "size of the KV pool"),
        "--tight-tokens": (2048, "of the pool in which admission is compared: outputs outgrow it"),
        "--chunk-tokens": (128, "budget of a step with chunked prefill"),
        "--tbt-ms": (25, "what two engines promise that both do all"),
    }
    parser.add_argument("--gpu", action="store_true", help=f"{_GPU_SHAPE}, and lengths as they are")
    for name, (default, what) in numbers.items():
        parser.add_argument(name, type=int, default=default, help=what)
    parser.add_argument("--out", default="baselines", help="name of the file of results")
    flags.add_flags(parser, EngineConfig)
    parser.set_defaults(block_size=8)  # scaled down like the lengths
    return parser


def _means(jobs: Sequence[Job]) -> dict[str, float]:
    return {
        "mean_prompt": sum(job.num_prompt for job in jobs) / len(jobs),
        "mean_output": sum(job.num_outputs for job in jobs) / len(jobs),
    }


def _at_once(player: Player, scheme: Scheme, jobs: Sequence[Job]) -> dict[str, Any]:
    outcome = player.play(scheme, jobs, [0.0] * len(jobs))
    return {
        "name": scheme.name,
        "requests_per_s": len(jobs) / outcome.duration_s,
        "waste": outcome.waste,
        "mean_running": sum(outcome.num_running) / len(outcome.num_running),
        "preemptions": outcome.num_preemptions,
    }


def _latencies(times: Sequence[TokenTimes]) -> dict[str, Any]:
    ttfts = [one.ttft_s for one in times if one.ttft_s is not None]
    gaps = [gap for one in times for gap in one.gaps_s]
    found = {}
    for name, samples in (("ttft", ttfts), ("tbt", gaps)):
        for q in (50, 99):
            found[f"{name}_p{q}_s"] = percentile(samples, q)
    return found


def _show(row: dict[str, Any]) -> None:
    cells = [f"{k} {v:.3g}" if isinstance(v, float) else f"{v}" for k, v in row.items()]
    print("  ".join(cells), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
