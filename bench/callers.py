"""The cost of bulk callers for a light caller: its TTFT at one GPU's engine, and bulk throughput.

python -m baton.bench.callers [--shape NAME]      printed, and written to bench/results/callers.json

Ten callers keep 40 prompts each waiting, of 3000 to 8192 tokens; an eleventh sends prompts of 4 to
64 tokens, five per second. The engine runs in this process without hand-offs: TTFT ends when the
step is collected. The bound is 3 x the idle TTFT of 64 tokens plus the longest bulk step.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine import engine
from baton.engine.local import LocalEngine

from .floors.figures import ROOT, Figure, command_line, commit, machine, table
from .floors.gpu_shapes import SHAPES

_NUM_BULK, _WAITING_EACH, _BULK_TOKENS = 10, 40, (3000, 8192)
_LIGHT, _LIGHT_TOKENS, _LIGHT_PER_S = 10, (4, 64), 5.0
_CHUNK_TOKENS = 8192
_LOOK_S = 0.0002
_NEVER_WAITS = 1.0  # share of a step: the next step is launched a whole step early, at once


class CallerLoad:
    """One engine and all its callers."""

    def __init__(self, local: LocalEngine, vocab: int) -> None:
        self._engine = local.engine
        self._random = random.Random(0)
        self._vocab = vocab
        self._num_requests = 0
        self._sent_s: dict[str, float] = {}
        self._bulk_tokens: dict[str, int] = {}

    def _add(self, caller_id: int, length: tuple[int, int]) -> tuple[str, int]:
        self._num_requests += 1
        num_tokens = self._random.randint(*length)
        prompt = tuple(self._random.randrange(self._vocab) for _ in range(num_tokens))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = Request(f"{self._num_requests:032x}", 0, prompt, sampling, caller_id=caller_id)
        self._engine.add(request)
        return request.key, num_tokens

    def _add_bulk(self, caller_id: int) -> None:
        key, num_tokens = self._add(caller_id, _BULK_TOKENS)
        self._bulk_tokens[key] = num_tokens

    def _arrivals(self, until_s: float) -> Iterator[float]:
        at_s = time.perf_counter()
        while at_s < until_s:
            at_s += self._random.expovariate(_LIGHT_PER_S)
            yield at_s

    def idle_s(self, length: tuple[int, int]) -> float:
        """The median TTFT of a prompt on the idle engine."""
        took_s = []
        for _ in range(9):
            begin_s = time.perf_counter()
            self._add(0, length)
            while self._engine.has_work:
                self._engine.step()
            took_s.append(time.perf_counter() - begin_s)
        return sorted(took_s)[4]

    def run(self, seconds: float) -> tuple[list[float], float]:
        """(the light caller's TTFTs in ascending order, bulk prompt tokens per second)."""
        engine, ttfts_s, num_bulk = self._engine, [], 0
        for caller_id in range(_NUM_BULK):
            for _ in range(_WAITING_EACH):
                self._add_bulk(caller_id)
        begin_s = time.perf_counter()
        arrivals = self._arrivals(begin_s + seconds)
        next_s = next(arrivals)

        def meanwhile() -> bool:
            nonlocal next_s
            time.sleep(_LOOK_S)
            if (now_s := time.perf_counter()) < next_s:
                return False
            self._sent_s[self._add(_LIGHT, _LIGHT_TOKENS)[0]] = now_s
            next_s = next(arrivals, float("inf"))
            return True

        while time.perf_counter() < begin_s + seconds:
            for token in engine.step(meanwhile).tokens:
                if token.key in self._sent_s:
                    ttfts_s.append(time.perf_counter() - self._sent_s.pop(token.key))
                else:
                    num_bulk += self._bulk_tokens.pop(token.key)
                    self._add_bulk(self._random.randrange(_NUM_BULK))
        rate = num_bulk / (time.perf_counter() - begin_s)
        for key in [*self._bulk_tokens, *self._sent_s]:
            engine.abort(key)
        while engine.has_work:
            engine.step()
        self._bulk_tokens.clear()
        self._sent_s.clear()
        return sorted(ttfts_s), rate


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--pairs", type=int, default=3, help="of runs, with and without waiting")
    parser.add_argument("--commit", default=None, help="what is measured, where git does not know")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "callers.json")
    arguments = parser.parse_args(argv)
    shape = SHAPES[arguments.shape]
    folder = shape.write_config(Path(tempfile.mkdtemp(prefix="baton-shape-")))
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        load_format="dummy",
        max_num_batched_tokens=_CHUNK_TOKENS,
        enable_prefix_caching=False,
    )
    callers = CallerLoad(LocalEngine.load(config, print), shape.vocab)
    callers.run(5.0)  # the engine fits its step cost model
    bound_s = 3 * callers.idle_s((64, 64)) + callers.idle_s((_CHUNK_TOKENS, _CHUNK_TOKENS))
    early = engine._EARLY
    found: dict[str, list[float]] = {}
    for _ in range(arguments.pairs):
        for name, share in (("", early), (", launched at once", _NEVER_WAITS)):
            engine._EARLY = share
            ttfts_s, rate = callers.run(arguments.seconds)
            at_99_ms = ttfts_s[int(0.99 * len(ttfts_s))] * 1e3
            found.setdefault(f"light caller, TTFT p99{name}", []).append(at_99_ms)
            found.setdefault(f"bulk callers{name}", []).append(rate)
    figures = [
        Figure(name, "tokens/s", tuple(samples))
        if name.startswith("bulk")
        else Figure(name, "ms", tuple(samples), target=bound_s * 1e3)
        for name, samples in found.items()
    ]
    print(table(figures))
    result = {
        "gpu": torch.cuda.get_device_name(),
        "commit": arguments.commit or commit(),
        "command": command_line("callers", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "shape": shape.name,
        "figures": [figure.as_dict() for figure in figures],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
