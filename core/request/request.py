"""One request as every part of Baton sees it: prompt, sampling parameters, why it ended; the random
key and the log-probabilities of its tokens.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .constraint import Constraint
from .parameters import (
    FLAG,
    LIMIT,
    SEED,
    at_least,
    between,
    count,
    number,
    parameter,
    parameters_of,
)
from .text_parameters import (
    EARLY_STOPPING,
    stop_strings,
    text_like,
    token_biases,
    token_ids,
    token_set,
)
from .token_ids import column

MOST_OUTPUTS = 16  # of a prompt


class FinishReason(enum.Enum):
    """Why a request ended well. Failures are errors, not finish reasons."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the model's context


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens: the table of what a client may request, as parameters.py describes.

    An instance is validated; `None` means "no limit" or "not requested". `stop` strings are judged
    at the gateway, all else on the node. `constraint`: what the whole output must look like, given
    as json_schema, regex, choice or grammar. docs/sampling.md has the order in which these act.
    """

    max_tokens: int = parameter(
        16,
        at_least(1),
        "prompt and output fit the context",
        absent="what is left of the context; /v1/completions: 16",
        over_http="/v1/chat/completions: also `max_completion_tokens`",
    )
    temperature: float = parameter(
        1.0, number(0, 2), "0 is greedy: no filter, no chance; the lowest id of equals"
    )
    top_p: float = parameter(
        1.0,
        number(0, 1, is_open=True),
        "keeps the likeliest tokens that together have this probability",
    )
    top_k: int | None = parameter(
        None, LIMIT, "keeps the k likeliest, and what equals the k-th", absent="0: no limit"
    )
    seed: int = parameter(0, SEED, "the result shows which was used", absent="drawn")
    stop: tuple[str, ...] = parameter(
        (), stop_strings(16, 256), "ends the output in front of the first match"
    )
    stop_token_ids: tuple[int, ...] = parameter(
        (), token_ids(256), "ends the output behind the id, whose text is left out"
    )
    ignore_eos: bool = parameter(
        False, FLAG, "EOS does not end the output; `min_tokens` forbids it all the same"
    )
    min_p: float = parameter(
        0.0, number(0, 1), "drops what is less likely than this part of the likeliest"
    )
    repetition_penalty: float = parameter(
        1.0,
        number(0, 2, is_open=True),
        "on tokens of prompt and output: logits > 0 are divided, others multiplied",
    )
    presence_penalty: float = parameter(
        0.0, number(-2, 2), "subtracted once from tokens of the output"
    )
    frequency_penalty: float = parameter(
        0.0, number(-2, 2), "subtracted from tokens of the output, times their count"
    )
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (), token_biases(1024, 100), "added to the logits"
    )
    allowed_token_ids: tuple[int, ...] = parameter(
        (),
        token_set(),
        "no other can be chosen: EOS has to be among them where it shall end the output, and with "
        "a form of the output",
        absent="all",
    )
    min_tokens: int = parameter(
        0,
        at_least(0),
        "`max_tokens` at most: before so many tokens neither EOS nor a stop id can be chosen, "
        "and no stop string is looked for",
    )
    logprobs: int | None = parameter(
        None,
        count(20),
        "with each token its log-probability and so many of the likeliest",
        over_http="/v1/chat/completions: true, and `top_logprobs`",
    )
    prompt_logprobs: int | None = parameter(
        None, count(20), "the same for the prompt's second token and all behind it"
    )
    tbt_target_ms: float = parameter(
        0.0,
        number(0, 60_000),
        "the longest step that it shall wait for where other prompts are computed beside it: they "
        "are cut for it, if its engine takes prompts (`baton up --mode`); half of the engine's own "
        "at least",
        absent="0: the engine's own",
    )
    speculative: bool = parameter(
        True, FLAG, "false: none of its tokens are drafted, where its engine does that"
    )
    use_beam_search: bool = parameter(
        False,
        FLAG,
        "the `n` best of `best_of` beams, all at the end; not with `seed`, `stop`, filters, a "
        "temperature but 0 and 1, or a form of the output",
    )
    best_of: int = parameter(
        1,
        between(1, MOST_OUTPUTS),
        "as many samples are made, the `n` likeliest are the answer, at the end; with "
        "`use_beam_search`: how many beams there are",
        absent="`n`",
    )
    length_penalty: float = parameter(
        1.0,
        number(-10, 10),
        "of beams: a finished one's score is divided by its length to this power",
    )
    early_stopping: str = parameter(
        "false",
        EARLY_STOPPING,
        "of beams: true ends the search once `best_of` are finished, false once none is likely to "
        "become better, `never` once none can",
    )
    num_beam_groups: int = parameter(
        1, between(1, MOST_OUTPUTS), "the beams are divided into so many, each a search of its own"
    )
    diversity_penalty: float = parameter(
        0.0,
        number(0, 100),
        "of beam groups: subtracted from a token for each beam of the groups before that has "
        "chosen it in the same step",
    )
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
    def needs_more_than_noise(self) -> bool:
        """Whether temperature and noise are not all there is to a token, whatever came before."""
        has_filters = self.top_k is not None or self.top_p < 1 or self.min_p > 0
        return bool(self.logit_bias) or (has_filters and not self.is_greedy)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a client may request beside how tokens are chosen: the gateway's part of the table.

    `cache_salt`: once the gateway has keyed it with the tenant, not as the client wrote it.
    """

    n: int = parameter(
        1,
        between(1, MOST_OUTPUTS),
        "samples of the prompt, each with a stream and a result of its own",
    )
    cache_salt: str = parameter(
        "",
        text_like("[A-Za-z0-9_.-]{1,64}", "1 to 64 of A-Z a-z 0-9 _ . -"),
        "cached prefixes are shared with requests of the same salt alone",
    )
    include_stop_str_in_output: bool = parameter(
        False, FLAG, "the text ends behind the stop string, or with the stop id's text"
    )
    skip_special_tokens: bool = parameter(
        True, FLAG, "false: special tokens show in the text, those that end it excepted"
    )
    add_special_tokens: bool = parameter(
        True,
        FLAG,
        "false: a text's prompt gets none of the tokenizer's own",
        absent="true; of a chat: false",
    )


SAMPLING = parameters_of(SamplingParams)
OPTIONS = parameters_of(RequestOptions)


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """The engine that is likely to have a prompt's first `num_blocks` blocks in its cache: they are
    pulled from there, for `limit_s` at most, before the rest is computed."""

    incarnation: str
    num_blocks: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a request is computed with. `digest` (32 hex digits) is of its content:
    what engines know it by. `path` is where an engine that does not have it reads it."""

    name: str
    digest: str
    path: str


@dataclass(frozen=True, slots=True)
class Request:
    """A request as a node receives it.

    `request_id` (32 hex digits) is drawn by the gateway; `attempt` counts its dispatches, and
    messages of an older attempt are dropped. `output_token_ids` are tokens that earlier attempts
    already streamed: the node computes them like prompt, and continues at their position. Both are
    columns of token_ids.py wherever a prompt may be long.

    `sample_index`: which sample of the prompt this is. `fork_ids` are the request ids of further
    samples, of the indices that follow: they share this one's prompt and its blocks until their
    first tokens are sampled, and are requests of their own from then on. `caller_id`: whose it is;
    queues are fair between callers. `may_refuse`: an engine whose promise it would break sends it
    back. `prefix_source`: for whoever computes the prompt. `adapter`: None for the model itself.
    `is_on_trial`: an engine died under it, and it is computed beside no other such request.
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
        """That of its adapter; empty without one. Part of what its KV depends on."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def forks(self) -> tuple[Request, ...]:
        """The further samples as requests. The prompt's log-probabilities are the first one's."""
        if not self.fork_ids:
            return ()
        sampling = replace(self.sampling, prompt_logprobs=None)
        return tuple(
            replace(self, request_id=fork_id, sample_index=index, fork_ids=(), sampling=sampling)
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
    def num_sequences(self) -> int:
        """Sequences that decode for it: its samples, or the beams of its one search."""
        return self.sampling.best_of if self.sampling.use_beam_search else 1 + len(self.fork_ids)

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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of the model's own distribution: temperature 1, before bias, penalties, masks and filters.

    `logprob` is the token's own; `top` are (token id, logprob), likeliest first, equals by id.

    `top` is as long as was requested, and holds the token itself only if it is among these.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_POSITIONS = 3 * GOLDEN & _MASK


def mix64(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea & Flood 2014): a bijection of the 64-bit integers that
    scatters neighbours, exact on every device."""
    value = value & _MASK  # not in place: it may be the caller's array
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def token_key(seed: int, sample_index: int, position: int) -> int:
    """The unsigned 64-bit key for one token of one sample: a pure function, so that a token never
    depends on its batch. `position`: the token's index in the sequence.

    noise = gumbel(mix(key, vocabulary id)) in kernels/sampling/sampling.py; argmax(logits + noise)
    """
    return key_at(sample_key(seed, sample_index), position)


def sample_key(seed: int, sample_index: int) -> int:
    """What the keys of all tokens of one sample have in common, for `key_at`."""
    return mix64(mix64(seed + GOLDEN) ^ (sample_index + 2 * GOLDEN))


def key_at(sample_key: int, position: int) -> int:
    """The `token_key` of one position; of many, where both are arrays of uint64."""
    return mix64(sample_key ^ (position + _POSITIONS))
