"""One request as every part of Baton sees it: prompt, sampling parameters, why it ended."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .constraint import Constraint
from .token_ids import column


class FinishReason(enum.Enum):
    """Why a request ended well. Failures are errors, not finish reasons."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the model's context


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Already validated; `None` means "no limit".

    `temperature == 0` is greedy and ignores the filters (top_p, top_k, min_p), nothing else. `stop`
    strings are judged at the gateway, all else on the node. `logprobs` and `prompt_logprobs`: how
    many of the likeliest tokens to tell beside each; 0: only its own, None: nothing. `constraint`:
    what the whole output must look like. The order in which these act is in docs/sampling.md.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logits depend on which tokens came before it."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def needs_history(self) -> bool:
        """Whether no token can be chosen before the host knows the one before it."""
        return self.has_penalties or self.constraint is not None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request as a node receives it.

    `request_id` (32 hex digits) is drawn by the gateway; `attempt` counts its dispatches, and
    messages of an older attempt are dropped. `output_token_ids` are tokens that earlier attempts
    already streamed: the node computes them like prompt, and continues at their position. Both are
    columns of token_ids.py wherever a prompt may be long.

    `sample_index` tells the samples of one prompt apart. `fork_ids` are the request ids of further
    samples, of the indices that follow: they share this one's prompt and its blocks until their
    first tokens are sampled, and are requests of their own from then on. `caller_id`: whose it is;
    queues are fair between callers.
    """

    request_id: str
    attempt: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    output_token_ids: Sequence[int] = ()
    cache_salt: str = ""
    sample_index: int = 0
    fork_ids: tuple[str, ...] = ()
    caller_id: int = 0

    @property
    def forks(self) -> tuple[Request, ...]:
        """The further samples as requests."""
        return tuple(
            replace(self, request_id=fork_id, sample_index=index, fork_ids=())
            for index, fork_id in enumerate(self.fork_ids, start=self.sample_index + 1)
        )

    @property
    def key(self) -> str:
        """What a node files this request under: unique, and never equal across attempts."""
        return f"{self.request_id}/{self.attempt}"

    @property
    def known_token_ids(self) -> array[int]:
        """Prompt and outputs behind each other, in a column of its own."""
        return column(self.prompt_token_ids) + column(self.output_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose KV can be computed before anything new is sampled."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to pull one request's KV: drawn by the gateway, sent to both nodes."""

    transfer_id: str
    source_incarnation: str
    puller_incarnation: str
