"""Pipeline stages on a CPU, each a process with one thread, beside a single such process.

python -m baton.bench.cpu_families.pipeline [--stages 2]

The loss comes from stages that wait: pipeline fill and drain, stages of unequal length, and the
transfers between them. For S stages it is the share 1 - T1 / (S * TS) of their time. The figure is
meaningless on fewer cores than stages.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine

from .small_model import prompt

_PROMPTS, _PROMPT_TOKENS = 16, 512
_DECODES, _OUTPUT_TOKENS = 32, 64
_REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    num_stages = parser.parse_args().stages
    alone, staged = (_measure(n) for n in (1, num_stages))
    print(f"{num_stages} stages, {os.cpu_count()} cores, bundled model")
    for name, one_s in alone.items():
        all_s = staged[name]
        lost = 1 - one_s / (num_stages * all_s)
        print(
            f"{name}: {one_s:.2f} s in one process, {all_s:.2f} s in {num_stages}: "
            f"{one_s / all_s:.2f} times as fast, {lost:.0%} lost"
        )


def _measure(num_stages: int) -> dict[str, float]:
    """Seconds of each workload, the best of several runs."""
    config = EngineConfig(
        device="cpu",
        cpu_kv_bytes=96 << 20,
        enable_prefix_caching=False,
        pipeline_parallel_size=num_stages,
    )
    engine = LocalEngine.load(config, lambda line: None)
    try:
        return {
            f"{_PROMPTS} prompts of {_PROMPT_TOKENS}": _best_s(lambda: _run(engine, _PROMPTS, 1)),
            f"{_DECODES} x {_OUTPUT_TOKENS} tokens": _best_s(
                lambda: _run(engine, _DECODES, _OUTPUT_TOKENS, 16)
            ),
        }
    finally:
        engine.close()


def _run(
    engine: LocalEngine, num_requests: int, num_tokens: int, num_prompt_tokens: int = _PROMPT_TOKENS
) -> None:
    way = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    requests = [
        Request(f"{i:032x}", 0, prompt(i, num_prompt_tokens), way) for i in range(num_requests)
    ]
    for _ in engine.generating(requests, {}):
        pass


def _best_s(run: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return min(times)


if __name__ == "__main__":
    main()
