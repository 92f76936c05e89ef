"""What an engine tells those above it: tokens, finished chunks, load. All values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.errors import BatonError
from ...core.request.request import FinishReason, TokenLogprobs
from ...core.step_cost import StepShape
from ..execution.batch import SampledToken
from ..kv.disk.disk_tier import DiskCounts
from ..kv.host_copies import HostCounts


class TokenOutput(NamedTuple):
    """Output token number `index` (from 0, over all attempts); EOS and stop ids included.

    `top`: the likeliest (token id, logprob), as many as the request asks for.
    """

    key: str
    index: int  # type: ignore[assignment]  # not the tuple's method
    token_id: int
    logprob: float
    finish_reason: FinishReason | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """The whole output of a request that is one of the best beams of its search."""

    key: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt's tokens from position `first_index` on; the first token (0) has none."""

    key: str
    first_index: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """The KV of a held request's first `num_tokens` tokens is complete, 0: already, or once `step`
    steps are: see `LaunchedStep.number`.

    One with a step is followed by one without, unless the request ends before. That is the last one
    with what is `sampled` behind its tokens: a token, or the candidates that a search of beams
    begins with, which come of one that is not held too.
    """

    key: str
    num_tokens: int
    is_last: bool
    sampled: SampledToken | None = None
    step: int = 0


@dataclass(slots=True)
class StepOutput:
    """What one step brought, complete once `Engine.step` returns it. `started`: requests that took
    part in a step here for the first time, with how many tokens the prefix cache had of them.

    That is their prefill's first chunk, or after `start` their first decode.
    """

    tokens: list[TokenOutput] = field(default_factory=list)
    chunks: list[ChunkOutput] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    failed: list[tuple[str, BatonError]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    beams: list[FinishedBeam] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is. `free_blocks` counts cached ones, which are there for the taking.

    `waiting_tokens` of prompts are still to be computed, as far as is known: `waiting_by_caller`
    adds up to them, and `waiting_pairs` (core/step_cost.py) are what they see. `held_blocks` are
    held for pullers, or will be when they are computed, and `credit_blocks` may still be.
    `room_blocks` are left beside the estimated peak of all that is here or pending; what the prefix
    cache holds of waiting prompts is not taken off. A new request is expected to bring
    `output_tokens`, of the last ones to end each brought `mean_output_tokens`; 0: not known.
    """

    num_running: int
    num_waiting: int
    waiting_tokens: int
    waiting_pairs: int
    free_blocks: int
    credit_blocks: int
    held_blocks: int
    room_blocks: int
    output_tokens: int
    mean_output_tokens: int
    waiting_by_caller: Mapping[int, int]
    decodes: StepShape = StepShape()  # noqa: RUF009 (frozen): those that run, as a step of them alone


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Steps of one sequence that had drafts, these drafts, and how many of them were accepted and
    output, at each position."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Totals:
    """Counted since the engine was made; none of them ever falls.

    `prefix_query_tokens` are the known tokens of all that was given blocks, `prefix_hit_tokens`
    those of them that the prefix cache held, `host_hit_tokens` those of these that host memory did,
    or a disk behind it.
    What was preempted counts again; of `num_swaps` preempted requests the KV went to host memory.
    `num_prompts` came to be computed here, of which steps have had `num_prompt_tokens`.
    `num_promised_steps` had decodes that were promised something, `num_kept_steps` of them took no
    longer; `num_refusals` requests would have broken it. `expert_tokens` are those that chose each
    expert, over all layers; empty without experts, and a little behind.
    """

    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0
    num_promised_steps: int = 0
    num_kept_steps: int = 0
    num_refusals: int = 0
    expert_tokens: tuple[int, ...] = ()
    num_swaps: int = 0
    host_hit_tokens: int = 0
    host: HostCounts = HostCounts()  # noqa: RUF009 (frozen)
    disk: DiskCounts = DiskCounts()  # noqa: RUF009 (frozen)
    speculation: SpeculationCounts = SpeculationCounts()
