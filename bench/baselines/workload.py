"""Requests with ShareGPT's lengths, the same for every scheme.

A prompt begins with one of a few system prompts. Its output ends at the length in the file, which
no planner knows: planners see only `max_tokens`, which is the same for all requests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams

from ..serve.clients.workloads import sharegpt_lengths

_ANY_LENGTH = 1 << 20
_NUM_SYSTEM_PROMPTS = 4
_FIRST_ID = 10  # above the ids of special tokens


@dataclass(frozen=True, slots=True)
class WorkShape:
    """Prompt and output lengths are divided by the scales; `max_len` limits prompt plus output."""

    num_requests: int
    prompt_scale: float
    output_scale: float
    max_len: int
    max_tokens: int
    system_tokens: int
    vocab_size: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A request and the length that its output will have."""

    request: Request
    num_outputs: int

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)


def make_jobs(shape: WorkShape) -> list[Job]:
    """As many jobs as the shape has, with lengths from random lines of the file, seeded."""
    pairs = sharegpt_lengths(_ANY_LENGTH)
    chance = random.Random(shape.seed)
    systems = [_ids(chance, shape, shape.system_tokens) for _ in range(_NUM_SYSTEM_PROMPTS)]
    jobs = []
    for number, (prompt, output) in enumerate(chance.choices(pairs, k=shape.num_requests)):
        num_outputs = min(max(2, round(output / shape.output_scale)), shape.max_tokens)
        most = shape.max_len - shape.max_tokens
        num_prompt = min(max(shape.system_tokens + 1, round(prompt / shape.prompt_scale)), most)
        ids = chance.choice(systems) + _ids(chance, shape, num_prompt - shape.system_tokens)
        sampling = SamplingParams(max_tokens=shape.max_tokens, temperature=0.0, seed=number)
        jobs.append(Job(Request(f"{number:032x}", 0, ids, sampling), num_outputs))
    return jobs


def _ids(chance: random.Random, shape: WorkShape, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(_FIRST_ID, shape.vocab_size) for _ in range(count))


def poisson(num_requests: int, rate_per_s: float, seed: int) -> Sequence[float]:
    """Arrival times in seconds; all 0 if the rate is infinite."""
    chance = random.Random(seed)
    at_s, times = 0.0, []
    for _ in range(num_requests):
        at_s += chance.expovariate(1.0) / rate_per_s
        times.append(at_s)
    return times
