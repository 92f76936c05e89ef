"""The outputs of an engine: tokens, finished chunks, its load and counters. All are values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.errors import BatonError
from ...core.request.request import FinishReason, TokenLogprobs
from ...core.step_shape import StepShape
from ..execution.batch import SampledToken
from ..kv.disk.disk_tier import DiskCounts
from ..kv.host_copies import HostCounts


class TokenOutput(NamedTuple):
    """Output token number `index` (from 0, over all attempts); EOS and stop ids included.

    `top`: the most likely (token id, logprob), as many as requested.
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
    """Log-probabilities of the prompt's tokens from `first_index` on; token 0 has none."""

    key: str
    first_index: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """The KV of a held request's first `num_tokens` tokens is complete: now (`step` 0), or once
    `step` steps are (see `LaunchedStep.number`).

    A chunk with a step is followed by one without, unless the request ends before. The last chunk
    has what was `sampled`: a token, or the candidates that a beam search begins with; the chunk of
    a beam search may be of a request that is not held.
    """

    key: str
    num_tokens: int
    is_last: bool
    sampled: SampledToken | None = None
    step: int = 0


@dataclass(slots=True)
class StepOutput:
    """The results of one step, complete once `Engine.step` returns it. `started`: requests that
    were in a step of this engine for the first time, with the number of their cached tokens.

    That step has the first chunk of their prefill, or after `start` their first decode.
    """

    tokens: list[TokenOutput] = field(default_factory=list)
    chunks: list[ChunkOutput] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    failed: list[tuple[str, BatonError]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    beams: list[FinishedBeam] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is. `free_blocks` includes cached blocks that can be evicted.

    `waiting_tokens`: prompt tokens that are not computed, as far as is known; `waiting_by_caller`
    adds up to them, and `waiting_pairs` are their (query, key) pairs (core/step_shape.py).
    `held_blocks` are held for pullers, or will be once they are computed; `credit_blocks` more may
    be. `room_blocks` are left beside the estimated peak of all sequences and pending requests,
    cached prefixes of waiting prompts counted as not cached. `output_tokens`: the estimate for a
    new request; `mean_output_tokens`: of the last requests that ended; 0: not known.
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
    decodes: StepShape = StepShape()  # noqa: RUF009 (frozen): a step of the running ones alone


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """How often a sequence was in a step with drafts, the number of drafts, and how many of them
    were accepted and output at each position."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted: tuple[int, ...] = ()


@dataclass(slots=True)
class Totals:
    """Counters since the engine was created; none of them ever falls.

    `prefix_query_tokens`: known tokens of all sequences that were allocated blocks;
    `prefix_hit_tokens`: those of them that were cached; `host_hit_tokens`: those of these in host
    memory or on the disk behind it. A preempted sequence counts again; the KV of `num_swaps`
    preempted ones was copied to host memory. `num_prompts` were received, `num_prompt_tokens` have
    been computed. `num_promised_steps` had decodes with a promised step time, which
    `num_kept_steps` of them kept, and for which `num_refusals` requests were rejected.
    `expert_tokens`: the tokens routed to each expert, over all layers, with a short delay; empty
    without experts.
    """

    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
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
