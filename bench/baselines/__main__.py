"""The schemes beside each other, as a table, a picture and bench/results/baselines.json.

    python -m baton.bench.baselines                               the bundled model, this CPU
    python -m baton.bench.baselines --model DIR --load-format dummy --scale 1 --out baselines_8b

Each scheme is played twice over the same requests: all at once, which gives requests/s, and by
Poisson arrivals at a rate that the last scheme keeps up with, which gives TTFT and TBT. Who is
admitted matters where outputs outgrow the pool: there prompts are a sixth, outputs thrice as long,
and the pool is half.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from baton.core import flags
from baton.core.engine_config import EngineConfig
from baton.core.metrics import percentile
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.kv_memory import CpuKvMemory

from ..floors.figures import ROOT, command_line, commit, machine
from .play import Outcome, Player, warm_up
from .schemes import ADMISSIONS, ON_GPUS, SCHEMES, Scheme
from .workload import Job, WorkShape, make_jobs, poisson

_LOAD = 0.7  # of what the last scheme can do


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    arguments, measured = _parser().parse_args(argv), commit()
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
    num_blocks = min(runner.kv.num_blocks, arguments.pool_tokens // config.block_size + 2)
    num_few = num_blocks // 2  # for admission: a pool that outputs outgrow
    player, tight = (
        Player(runner, num, config.block_size, shape.max_len, arguments.chunk_tokens)
        for num in (num_blocks, num_few)
    )
    warm_up(player, jobs, SCHEMES[-1])
    schemes = [*SCHEMES, *(ON_GPUS if is_gpu else ())]
    rows = [_at_once(player, scheme, jobs) for scheme in schemes]
    rate_per_s = _LOAD * rows[-1]["requests_per_s"]
    arrivals_s = poisson(len(jobs), rate_per_s, seed=1)
    for scheme, row in zip(schemes, rows, strict=True):
        row |= _latencies(player.play(scheme, jobs, arrivals_s))
        _show(row)
    chats = make_jobs(
        replace(shape, prompt_scale=shape.prompt_scale * 6, output_scale=shape.output_scale / 3)
    )
    admissions = [_at_once(tight, scheme, chats) for scheme in ADMISSIONS]
    for row in admissions:
        _show(row)
    result = {
        "commit": measured,
        "command": command_line("baselines", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "clock": "wall" if is_gpu else "CPU time of the process",
        "model": runner.model_dir.name,
        "shape": asdict(shape),
        "pool_tokens": (num_blocks - 2) * config.block_size,
        "chunk_tokens": arguments.chunk_tokens,
        **_means(jobs),
        "chats": _means(chats) | {"pool_tokens": (num_few - 2) * config.block_size},
        "rate_per_s": rate_per_s,
        "schemes": rows,
        "admissions": admissions,
    }
    path = ROOT / "bench" / "results" / f"{arguments.out}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m baton.bench.baselines")
    numbers = {
        "--num-requests": (60, "requests of each run"),
        "--scale": (12, "divides ShareGPT's lengths"),
        "--longest": (1024, "tokens of prompt and output that a request may have"),
        "--most-outputs": (256, "max_tokens of every request"),
        "--system-tokens": (48, "of the four system prompts"),
        "--pool-tokens": (4096, "size of the KV pool"),
        "--chunk-tokens": (128, "budget of a step with chunked prefill"),
    }
    for name, (default, what) in numbers.items():
        parser.add_argument(name, type=int, default=default, help=what)
    parser.add_argument("--out", default="baselines", help="name of the file of results")
    flags.add_flags(parser, EngineConfig)
    parser.set_defaults(block_size=8)  # lengths are scaled, so blocks are
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


def _latencies(outcome: Outcome) -> dict[str, Any]:
    ttfts = [one.ttft_s for one in outcome.times if one.ttft_s is not None]
    gaps = [gap for one in outcome.times for gap in one.gaps_s]
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
