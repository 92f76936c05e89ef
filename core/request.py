"""One request as every part of Baton sees it: prompt, sampling parameters, why it ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """Why a request ended well. Failures are errors, not finish reasons."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the model's context


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Already validated; `None` means "no limit".

    `temperature == 0` is greedy and ignores the filters. `stop` strings are judged at the gateway,
    all else on the node.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request as a node receives it.

    `request_id` (32 hex digits) is drawn by the gateway; `attempt` counts its dispatches, and
    messages of an older attempt are dropped. `output_token_ids` are tokens that earlier attempts
    already streamed: the node computes them like prompt, and continues at their position.
    """

    request_id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""

    @property
    def key(self) -> str:
        """What a node files this request under: unique, and never equal across attempts."""
        return f"{self.request_id}/{self.attempt}"

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
