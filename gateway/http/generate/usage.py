"""The token counts of one HTTP request, over all of its prompts and samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...request.output_chunk import OutputChunk
from ..protocol.answers import PromptDetails, Usage


@dataclass(slots=True)
class TokenCounts:
    """`cached_tokens`: by prompt, known at its first sample's end."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)

    def add(self, prompt_index: int, chunk: OutputChunk) -> None:
        self.completion_tokens += len(chunk.token_ids)
        if chunk.result is not None:
            known = self.cached_tokens.get(prompt_index, 0)
            self.cached_tokens[prompt_index] = max(known, chunk.result.cached_tokens)

    @property
    def num_cached(self) -> int:
        return sum(self.cached_tokens.values())

    def usage(self) -> Usage:
        num_prompt, num_output = self.prompt_tokens, self.completion_tokens
        details = PromptDetails(self.num_cached)
        return Usage(num_prompt, num_output, num_prompt + num_output, details)
