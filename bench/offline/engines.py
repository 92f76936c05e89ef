"""Each engine's own LLM behind one function, and the host time of our engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_MODEL_LEN = 4096
_TEMPERATURE = 0.6

Generate = Callable[[list[list[int]], list[int]], object]  # prompts, output tokens of each


@dataclass(slots=True)
class HostTimes:
    """CPU and wall time of the engine's thread in steps in which `num_seqs` sequences got a token,
    in seconds from the end of the previous step. `looking_s`: the CPU time between polls of the
    device, which `cpu_s` excludes."""

    num_seqs: int
    cpu_s: list[float] = field(default_factory=list)
    looking_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    num_steps: int = 0
    _last: tuple[float, float] | None = None

    def watch(self, engine: Any) -> None:
        """Record every step of an engine from here on; call once."""
        take = engine.step

        def step(meanwhile: Callable[[], bool]) -> Any:
            looking_s = 0.0

            def look() -> bool:
                nonlocal looking_s
                began_s = time.thread_time()
                has_news = meanwhile()
                looking_s += time.thread_time() - began_s
                return has_news

            output = take(look)
            now = time.thread_time(), time.perf_counter()
            if self._last is not None and len(output.tokens) == self.num_seqs:
                self.cpu_s.append(now[0] - self._last[0] - looking_s)
                self.looking_s.append(looking_s)
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
            "looking_ms": round(1e3 * statistics.median(self.looking_s), 3),
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

    llm = LLM(model, enforce_eager=False, max_model_len=MAX_MODEL_LEN)

    def generate(prompts: list[list[int]], num_outputs: list[int]) -> object:
        params = [
            SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, max_tokens=num)
            for num in num_outputs
        ]
        return llm.generate(prompts, params, use_tqdm=False)

    return generate


ENGINES = {"baton": _baton, "vllm": _vllm, "nano": _nano}
