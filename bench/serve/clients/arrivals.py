"""Arrival times and lengths of requests, fixed before the first is sent, so that a slow system gets
just as many (open loop).

A prompt is described by its length and seeds: pieces with equal seeds have equal tokens, which is
how a trace expresses that two prompts share a prefix.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BACKGROUND = "background"  # the group of background streams
TRACE_PIECE_TOKENS = 512  # tokens per hash id of a Mooncake trace


@dataclass(frozen=True, slots=True)
class Prompt:
    """`seeds[i]` generates tokens [i * piece_tokens, (i + 1) * piece_tokens)."""

    num_tokens: int
    seeds: tuple[int, ...]
    piece_tokens: int

    @classmethod
    def drawn(cls, num_tokens: int, seed: int) -> Prompt:
        """A prompt that shares no prefix with prompts of other seeds."""
        return cls(num_tokens, (seed,), num_tokens)

    def token_ids(self, vocab_size: int) -> list[int]:
        """Token ids in [3, vocab_size): special ids are low in most vocabularies."""
        pieces = [
            np.random.default_rng(seed).integers(3, vocab_size, self.piece_tokens)
            for seed in self.seeds
        ]
        token_ids: list[int] = np.concatenate(pieces)[: self.num_tokens].tolist()
        return token_ids


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is due `at_s` after the start; requests of one `group` are reported
    together."""

    at_s: float
    prompt: Prompt
    num_output_tokens: int
    group: str


@dataclass(frozen=True, slots=True)
class Background:
    """Streams that run all the time: a stream that ends starts again with its own prompt.

    The first outputs are shortened by different amounts, or all streams would end at once.
    """

    num_streams: int
    num_prompt_tokens: int
    num_output_tokens: int

    def prompt(self, stream: int) -> Prompt:
        """The stream's own prompt, the same in every run: a restart costs next to no prefill."""
        return Prompt.drawn(self.num_prompt_tokens, 1_000_000 + stream)

    def first_output_tokens(self, stream: int) -> int:
        share = (stream + 1) / self.num_streams
        return max(1, int(self.num_output_tokens * share))


def poisson(
    rate_per_s: float,
    duration_s: float,
    *,
    num_prompt_tokens: int,
    num_output_tokens: int,
    seed: int,
    group: str,
) -> list[Arrival]:
    """Independent arrivals: exponential gaps with mean 1 / rate."""
    lengths = num_prompt_tokens, num_output_tokens
    return _poisson(rate_per_s, duration_s, lambda rng: lengths, seed, group)


def poisson_of(
    rate_per_s: float,
    duration_s: float,
    lengths: Sequence[tuple[int, int]],
    *,
    seed: int,
    group: str,
) -> list[Arrival]:
    """The same with lengths drawn from (prompt, output) pairs."""
    return _poisson(rate_per_s, duration_s, lambda rng: rng.choice(lengths), seed, group)


def _poisson(
    rate_per_s: float,
    duration_s: float,
    draw: Callable[[random.Random], tuple[int, int]],
    seed: int,
    group: str,
) -> list[Arrival]:
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s = rng.expovariate(rate_per_s)
    while at_s < duration_s:
        num_prompt_tokens, num_output_tokens = draw(rng)
        prompt = Prompt.drawn(num_prompt_tokens, rng.getrandbits(63))
        arrivals.append(Arrival(at_s, prompt, num_output_tokens, group))
        at_s += rng.expovariate(rate_per_s)
    return arrivals


def from_trace(path: Path, duration_s: float, *, speed: float, max_tokens: int) -> list[Arrival]:
    """The requests of a Mooncake trace, `speed` times as fast, without those that are too long.

    A hash id stands for 512 tokens; the trace has no tokens, so the hash id is their seed.
    """
    arrivals: list[Arrival] = []
    read = lzma.open if path.suffix == ".xz" else open
    with read(path, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    for line in lines:
        entry = json.loads(line)
        at_s = entry["timestamp"] / 1e3 / speed
        num_prompt, num_output = entry["input_length"], entry["output_length"]
        if at_s >= duration_s or num_prompt + num_output > max_tokens:
            continue
        prompt = Prompt(num_prompt, tuple(entry["hash_ids"]), TRACE_PIECE_TOKENS)
        arrivals.append(Arrival(at_s, prompt, num_output, "trace"))
    return arrivals


def deal(arrivals: Sequence[Arrival], num_hands: int) -> list[list[Arrival]]:
    """Distribute the arrivals round-robin over `num_hands` generators."""
    return [list(arrivals[hand::num_hands]) for hand in range(num_hands)]
