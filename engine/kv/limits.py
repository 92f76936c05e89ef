"""The limits of one engine, and which requests it rejects because of them."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import ContextLengthExceeded, InvalidRequest, PromptTooLarge
from ...core.request.request import Request
from .block_pool import NUM_RESERVED_BLOCKS

MAX_NUM_SEQS = 512  # unless the operator sets another


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Set at start. `num_blocks` includes the reserved ones.

    `max_held_blocks` limits the KV that is held for pullers, that of running prefills included;
    None: the whole pool. A single request may exceed it if nothing else is held.

    A pipeline of `num_stages` has as many steps in flight, or one more; a sequence is in the next
    step only once its token of the last one is known.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = 2048
    max_held_blocks: int | None = None
    prefill_chunk_tokens: int = 0  # of a step with a single prompt, if that is more
    graph_rows: tuple[int, ...] = ()  # sizes that mixed steps are padded to, ascending
    graph_prompt_tokens: int = 0  # most of such a step; with more it fits no graph
    num_stages: int = 1
    block_bytes: int = 0  # of all ranks

    @property
    def capacity(self) -> int:
        """Blocks for sequences."""
        return self.num_blocks - NUM_RESERVED_BLOCKS

    @property
    def num_spare_tokens(self) -> int:
        """By how many tokens a step may exceed `max_num_batched_tokens` to end a prompt."""
        return spare_tokens(self.max_num_batched_tokens)

    @property
    def prompt_step_tokens(self) -> int:
        """The most tokens of a step with a single prompt."""
        return max(self.max_num_batched_tokens, self.prefill_chunk_tokens)

    @property
    def last_chunk_tokens(self) -> int:
        """The tokens in the last step of a prompt that does not fit into one step. Their KV is
        still to pull after the first token; with fewer a GPU would lose more time than that takes.
        """
        return self.max_num_batched_tokens // 2

    @property
    def small_step_tokens(self) -> int:
        """The most tokens of prompts whose step is not shared with a long prompt of another caller,
        which would make it several times longer. Up to here a step takes a GPU about as long as one
        with a single token."""
        return self.max_num_batched_tokens // 8

    @property
    def held_blocks_limit(self) -> int:
        return self.capacity if self.max_held_blocks is None else self.max_held_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need, the last one perhaps partial."""
        return -(-num_tokens // self.block_size)

    def max_outputs(self, request: Request) -> int:
        """The most output tokens that the request can have, over all attempts."""
        room = self.max_model_len - len(request.prompt_token_ids)
        return min(request.sampling.max_tokens, room)

    def check(self, request: Request) -> None:
        """Raise an InvalidRequest if this engine can never serve the request."""
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        num_tokens = request.num_known_tokens
        if num_tokens >= self.max_model_len:
            raise ContextLengthExceeded(
                f"{num_tokens} tokens leave no room in a context of {self.max_model_len}"
            )
        if len(request.output_token_ids) >= request.sampling.max_tokens:
            raise InvalidRequest("max_tokens leaves nothing to generate", param="max_tokens")
        self.check_fits(num_tokens + 1)

    def check_fits(self, num_tokens: int) -> None:
        """Raise PromptTooLarge if `num_tokens` tokens exceed the whole pool."""
        needed = self.blocks_for(num_tokens)
        if needed > self.capacity:
            raise PromptTooLarge(
                f"{num_tokens} tokens need {needed} KV blocks; the pool has {self.capacity}"
            )


def spare_tokens(max_num_batched_tokens: int) -> int:
    """See `EngineLimits.num_spare_tokens`."""
    return max_num_batched_tokens // 16
