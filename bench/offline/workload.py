"""The requests, the same for each engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

MAX_ID = 10_000  # as in nano-vllm's benchmark


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts, and the number of output tokens of each."""

    prompts: list[list[int]]
    num_outputs: list[int]

    @classmethod
    def draw(cls, num_seqs: int, shortest: int, longest: int) -> Work:
        """Draws in nano-vllm's order: all prompts, then all output lengths."""
        rng = random.Random(0)
        prompts = [
            [rng.randint(0, MAX_ID) for _ in range(rng.randint(shortest, longest))]
            for _ in range(num_seqs)
        ]
        return cls(prompts, [rng.randint(shortest, longest) for _ in range(num_seqs)])

    def within(self, vocab_size: int) -> Work:
        """The same ids, reduced to a smaller vocabulary."""
        prompts = [[one % vocab_size for one in prompt] for prompt in self.prompts]
        return Work(prompts, self.num_outputs)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))
