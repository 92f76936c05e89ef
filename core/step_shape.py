"""What a step of an engine computes: how long it takes follows from that (step_cost.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work in one step. `pairs`: (query, key) pairs of prompt tokens. `keys`: those that
    decodes read, the sum of their context lengths."""

    num_prompt_tokens: int = 0
    pairs: int = 0
    num_decodes: int = 0
    keys: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_prompt_tokens + self.num_decodes

    def with_prompt(self, num_tokens: int, context: int) -> StepShape:
        """This step with a chunk of `num_tokens` of a prompt that has `context` computed ones."""
        pairs = self.pairs + pairs_of(num_tokens, context)
        return StepShape(self.num_prompt_tokens + num_tokens, pairs, self.num_decodes, self.keys)


def pairs_of(num_tokens: int, context: int) -> int:
    """(query, key) pairs of a prompt's chunk after `context` tokens."""
    return num_tokens * context + num_tokens * (num_tokens + 1) // 2
