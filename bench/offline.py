"""nano-vllm's public workload through `LLM`, ours or another's of the same calls: tokens a second.

    python -m baton.bench.offline --shape qwen3-0.6b
    python -m baton.bench.offline --shape llama-3.1-8b --engine vllm      (where vLLM is installed)
    python -m baton.bench.offline --model DIR --engine nano

256 prompts of 100 to 1024 random ids, each with 100 to 1024 tokens to come, all there at once, at a
temperature of 0.6, prefixes not cached: the requests and their seed are those of `bench.py` of
github.com/GeeeekExplorer/nano-vllm. Weights of a shape are random; tokens that are counted are
those to come. Of our engine also what the host does for a step with all sequences in it: the CPU
time of the thread that plans, launches, collects and delivers, while the device computes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .floors.figures import ROOT, command_line, commit, machine
from .floors.gpu_shapes import SHAPES

_MAX_ID = 10_000  # as there
_MAX_MODEL_LEN = 4096
_TEMPERATURE = 0.6

Generate = Callable[[list[list[int]], list[int]], object]  # prompts, and tokens to come of each


@dataclass(frozen=True, slots=True)
class Work:
    """The same for each engine."""

    prompts: list[list[int]]
    num_outputs: list[int]

    @classmethod
    def draw(cls, num_seqs: int, shortest: int, longest: int) -> Work:
        """In the order of nano-vllm's draws: all prompts, then all outputs."""
        rng = random.Random(0)
        prompts = [
            [rng.randint(0, _MAX_ID) for _ in range(rng.randint(shortest, longest))]
            for _ in range(num_seqs)
        ]
        return cls(prompts, [rng.randint(shortest, longest) for _ in range(num_seqs)])

    def within(self, vocab_size: int) -> Work:
        """The same ids, but of a smaller vocabulary."""
        prompts = [[one % vocab_size for one in prompt] for prompt in self.prompts]
        return Work(prompts, self.num_outputs)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(slots=True)
class HostTimes:
    """Of steps in which `num_seqs` sequences got a token: the thread's CPU time and the clock's,
    from the end of the step before to its own, in seconds."""

    num_seqs: int
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    num_steps: int = 0
    _last: tuple[float, float] | None = None

    def watch(self, engine: Any) -> None:
        """Note every step of an engine from now on; once."""
        take = engine.step

        def step(*args: Any) -> Any:
            output = take(*args)
            now = time.thread_time(), time.perf_counter()
            if self._last is not None and len(output.tokens) == self.num_seqs:
                self.cpu_s.append(now[0] - self._last[0])
                self.wall_s.append(now[1] - self._last[1])
            self._last = now
            self.num_steps += 1
            return output

        engine.step = step

    def summary(self) -> dict[str, Any]:
        if not self.cpu_s:
            return {"num_steps": self.num_steps, "num_full_steps": 0}
        return {
            "num_steps": self.num_steps,
            "num_full_steps": len(self.cpu_s),
            "host_ms": round(1e3 * statistics.median(self.cpu_s), 3),
            "step_ms": round(1e3 * statistics.median(self.wall_s), 3),
        }


def _baton(model: str, more: dict[str, Any], host: HostTimes) -> Generate:
    from baton import LLM, SamplingParams

    llm = LLM(model=model, skip_tokenizer_init=True, enable_prefix_caching=False, **more)
    host.watch(llm._calls._local.engine)

    def generate(prompts: list[list[int]], num_outputs: list[int]) -> object:
        params = [
            SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, max_tokens=num)
            for num in num_outputs
        ]
        return llm.generate(list(prompts), params, use_tqdm=False)

    return generate


def _vllm(model: str, more: dict[str, Any], host: HostTimes) -> Generate:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model=model, skip_tokenizer_init=True, enable_prefix_caching=False, **more)

    def generate(prompts: list[list[int]], num_outputs: list[int]) -> object:
        params = [
            SamplingParams(
                temperature=_TEMPERATURE, ignore_eos=True, max_tokens=num, detokenize=False
            )
            for num in num_outputs
        ]
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return generate


def _nano(model: str, more: dict[str, Any], host: HostTimes) -> Generate:
    from nanovllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model, enforce_eager=False, max_model_len=_MAX_MODEL_LEN)

    def generate(prompts: list[list[int]], num_outputs: list[int]) -> object:
        params = [
            SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, max_tokens=num)
            for num in num_outputs
        ]
        return llm.generate(prompts, params, use_tqdm=False)

    return generate


ENGINES = {"baton": _baton, "vllm": _vllm, "nano": _nano}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m baton.bench.offline")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    model.add_argument("--model", default="demo", help="a folder with weights")
    parser.add_argument("--engine", choices=ENGINES, default="baton")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=100, help="tokens, of prompts and outputs")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=_MAX_MODEL_LEN)
    parser.add_argument("--vocab-size", type=int, default=_MAX_ID + 1, help="ids are below")
    parser.add_argument("--repeats", type=int, default=2, help="the best counts")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more for LLM, JSON")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "offline.json")
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure, print, and add to the file of results."""
    arguments, measured = _parser().parse_args(argv), commit()
    work = Work.draw(arguments.num_seqs, arguments.shortest, arguments.longest)
    work = work.within(arguments.vocab_size)
    host = HostTimes(arguments.num_seqs)
    more = {"max_model_len": arguments.max_model_len, **arguments.engine_args}
    with tempfile.TemporaryDirectory(prefix="baton-shape-") as folder:
        model = arguments.model
        if arguments.shape:
            model = str(SHAPES[arguments.shape].write_config(Path(folder)))
            more["load_format"] = "dummy"
        generate = ENGINES[arguments.engine](model, more, host)
        generate(work.prompts[:4], [16] * 4)  # what only first steps take
        seconds = []
        for _ in range(arguments.repeats):
            began_s = time.perf_counter()
            generate(work.prompts, work.num_outputs)
            seconds.append(time.perf_counter() - began_s)
    row = {
        "engine": arguments.engine,
        "model": arguments.shape or Path(arguments.model).name,
        "num_seqs": arguments.num_seqs,
        "prompt_tokens": work.num_prompt_tokens,
        "output_tokens": sum(work.num_outputs),
        "seconds": [round(one, 3) for one in seconds],
        "tokens_per_s": round(sum(work.num_outputs) / min(seconds), 1),
        **(host.summary() if arguments.engine == "baton" else {}),
        "commit": measured,
        "command": command_line("offline", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
    }
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    _add(arguments.out, row)
    return 0


def _add(path: Path, row: dict[str, Any]) -> None:
    """In the place of what the same command of the same engine gave before."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    same = ("engine", "model", "num_seqs")
    rows = [one for one in rows if any(one[key] != row[key] for key in same)]
    path.write_text(json.dumps({"rows": [*rows, row]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
