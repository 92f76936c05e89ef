"""A request as engines receive it, why it ended, and the random keys and log-probabilities of its
tokens. Its parameters are in sampling_params.py."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .sampling_params import SamplingParams
from .token_ids import column


class FinishReason(enum.Enum):
    """Why a request ended well. Failures are errors, not finish reasons."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the model's context


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """The engine that probably has a prompt's first `num_blocks` blocks in its prefix cache. They
    are pulled from it, for `limit_s` at most, before the rest is computed."""

    incarnation: str
    num_blocks: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of a request. `digest` (32 hex digits) is of its content and identifies it to
    engines. `path`: where an engine that does not have it reads it."""

    name: str
    digest: str
    path: str


@dataclass(frozen=True, slots=True)
class Request:
    """A request as an engine receives it.

    `request_id` (32 hex digits) is drawn by the gateway; `attempt` counts its dispatches, and
    messages of an older attempt are dropped. `output_token_ids` were streamed by earlier attempts:
    the engine computes them like the prompt, and continues at their position. Both lists of ids are
    columns of token_ids.py wherever a prompt may be long.

    `sample_index`: the sample of the prompt. `fork_ids`: the request ids of further samples, with
    the following indices. They share the prompt and its blocks until their first tokens are
    sampled, and are separate requests from then on. `caller_id`: queues are fair between callers.
    `may_refuse`: an engine may send the request back if it would break its step-time promise.
    `prefix_source`: used by the engine that computes the prompt. `adapter`: None for the base
    model. `is_on_trial`: an engine died while it ran, and it runs beside no other such request.
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
    may_refuse: bool = False
    prefix_source: PrefixSource | None = None
    adapter: Adapter | None = None
    is_on_trial: bool = False

    @property
    def adapter_digest(self) -> str:
        """The digest of its adapter, or empty. Its KV depends on it."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def forks(self) -> tuple[Request, ...]:
        """The further samples as requests. Only the first sample has the prompt's logprobs."""
        if not self.fork_ids:
            return ()
        sampling = replace(self.sampling, prompt_logprobs=None)
        return tuple(
            replace(self, request_id=fork_id, sample_index=index, fork_ids=(), sampling=sampling)
            for index, fork_id in enumerate(self.fork_ids, start=self.sample_index + 1)
        )

    @property
    def key(self) -> str:
        """The key of this request on an engine: unique, and different for each attempt."""
        return f"{self.request_id}/{self.attempt}"

    @property
    def known_token_ids(self) -> array[int]:
        """Prompt and output ids, in a new column."""
        return column(self.prompt_token_ids) + column(self.output_token_ids)

    @property
    def num_sequences(self) -> int:
        """The number of its sequences: its samples, or the beams of its search."""
        return self.sampling.best_of if self.sampling.use_beam_search else 1 + len(self.fork_ids)

    @property
    def num_known_tokens(self) -> int:
        """The number of tokens whose KV can be computed before a token is sampled."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to pull the KV of one request: drawn by the gateway, sent to both engines."""

    transfer_id: str
    source_incarnation: str
    puller_incarnation: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities at one token, under the model's own distribution: temperature 1, before
    bias, penalties, masks and filters.

    `logprob`: of the token. `top`: (token id, logprob) of as many tokens as were requested,
    likeliest first, equal ones by id; it holds the token only if it is among these.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_POSITIONS = 3 * GOLDEN & _MASK


def mix64(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea & Flood 2014): a bijection of the 64-bit integers that
    scatters neighbours, exact on every device."""
    value = value & _MASK  # not in place: it may be an array of the caller
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def token_key(seed: int, sample_index: int, position: int) -> int:
    """The unsigned 64-bit random key of one token of one sample. A pure function, so that a token
    never depends on its batch. `position`: the index of the token in its sequence.

    noise = gumbel(mix(key, vocabulary id)) in kernels/sampling/sampling.py; argmax(logits + noise)
    """
    return key_at(sample_key(seed, sample_index), position)


def sample_key(seed: int, sample_index: int) -> int:
    """The part of the keys that all tokens of a sample share, for `key_at`."""
    return mix64(mix64(seed + GOLDEN) ^ (sample_index + 2 * GOLDEN))


def key_at(sample_key: int, position: int) -> int:
    """The `token_key` of a position, or of many positions if both are arrays of uint64."""
    return mix64(sample_key ^ (position + _POSITIONS))
