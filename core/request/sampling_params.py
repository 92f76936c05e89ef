"""The table of request parameters: what a client may request, one field a parameter, with the name
of the proto message's field. The kinds of values are in parameters.py and text_parameters.py.

Generated from the table: the fields of HTTP bodies and OpenAPI
(gateway/http/generate/request_fields.py), the checks of both fronts (gateway/validation), the codec
(proto/codec.py), the steps between an engine's ranks, and the table in docs/sampling.md. How the
sampling parameters act on logits is in kernels/sampling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .constraint import Constraint
from .json_fields import FieldKind
from .parameters import FLAG, LIMIT, SEED, ParameterKind, at_least, between, count, number
from .text_parameters import (
    EARLY_STOPPING,
    stop_strings,
    text_like,
    token_biases,
    token_ids,
    token_set,
)

MOST_OUTPUTS = 16  # of a prompt


@dataclass(frozen=True, slots=True)
class Parameter:
    """`absent`: the meaning of an absent field, as text, if that is not `default`.

    `over_http`: the HTTP form, as text, if it has another name or meaning there. `is_filter`: it
    drops tokens, once the temperature is applied.
    """

    default: Any
    kind: ParameterKind
    help: str
    absent: str | None = None
    over_http: str = ""
    is_filter: bool = False

    @property
    def field(self) -> FieldKind:
        """Its field in a JSON body."""
        return self.kind.field.within(description=self.help)


def parameter(default: Any, kind: ParameterKind, help: str, **more: Any) -> Any:
    """A dataclass field that is a request parameter; `more`: see Parameter."""
    described = Parameter(default, kind, help, **more)
    return dataclasses.field(default=default, metadata={"parameter": described})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens: the engines' part of the table.

    An instance is validated; `None` means "no limit" or "not requested". `stop` strings are judged
    at the gateway, all else on the node. `constraint`: what the whole output must look like, given
    as json_schema, regex, choice or grammar. docs/sampling.md has the order in which these act.
    """

    max_tokens: int = parameter(
        16,
        at_least(1),
        "most output tokens; prompt and output together must fit into the context",
        absent="the rest of the context; /v1/completions: 16",
        over_http="/v1/chat/completions: also `max_completion_tokens`",
    )
    temperature: float = parameter(
        1.0, number(0, 2), "0 is greedy: no filters, not random; of equal logits the lowest id"
    )
    top_p: float = parameter(
        1.0,
        number(0, 1, is_open=True),
        "keeps the fewest most likely tokens whose probabilities add up to this",
        is_filter=True,
    )
    top_k: int | None = parameter(
        None,
        LIMIT,
        "keeps the k most likely tokens, and those equal to the k-th",
        absent="0: no limit",
        is_filter=True,
    )
    seed: int = parameter(0, SEED, "random seed; the result reports the one used", absent="random")
    stop: tuple[str, ...] = parameter(
        (), stop_strings(16, 256), "strings that end the output; it stops before the first match"
    )
    stop_token_ids: tuple[int, ...] = parameter(
        (), token_ids(256), "token ids that end the output; the id is returned, its text is not"
    )
    ignore_eos: bool = parameter(
        False, FLAG, "EOS does not end the output; `min_tokens` still forbids it"
    )
    min_p: float = parameter(
        0.0,
        number(0, 1),
        "drops tokens less likely than this fraction of the most likely one's probability",
        is_filter=True,
    )
    repetition_penalty: float = parameter(
        1.0,
        number(0, 2, is_open=True),
        "for tokens of prompt and output: logits > 0 are divided by it, others multiplied",
    )
    presence_penalty: float = parameter(
        0.0, number(-2, 2), "subtracted once from the logit of each token that is in the output"
    )
    frequency_penalty: float = parameter(
        0.0, number(-2, 2), "subtracted from the logit of each output token, times its count"
    )
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (), token_biases(1024, 100), "added to these tokens' logits"
    )
    allowed_token_ids: tuple[int, ...] = parameter(
        (),
        token_set(),
        "only these tokens can be chosen; must include EOS if EOS should end the output, and with "
        "structured output",
        absent="all",
    )
    min_tokens: int = parameter(
        0,
        at_least(0),
        "before this many output tokens, EOS and stop ids cannot be chosen and stop strings are "
        "not matched; at most `max_tokens`",
    )
    logprobs: int | None = parameter(
        None,
        count(20),
        "returns each token's log-probability and those of this many most likely tokens",
        over_http="/v1/chat/completions: true, and `top_logprobs`",
    )
    prompt_logprobs: int | None = parameter(
        None, count(20), "the same for the prompt's tokens, from the second on"
    )
    tbt_target_ms: float = parameter(
        0.0,
        number(0, 60_000),
        "target for the longest step while this request decodes: other prompts in its steps are "
        "chunked to keep it, if its engine has a TBT promise (see `baton up --mode`); at least "
        "half of that promise",
        absent="0: the engine's promise",
    )
    speculative: bool = parameter(True, FLAG, "false: no speculative decoding for this request")
    use_beam_search: bool = parameter(
        False,
        FLAG,
        "returns the `n` best of `best_of` beams, all at the end; not with `seed`, `stop`, "
        "filters, structured output or a temperature other than 0 and 1",
    )
    best_of: int = parameter(
        1,
        between(1, MOST_OUTPUTS),
        "generates this many samples and returns the `n` most likely ones, at the end; with "
        "`use_beam_search`: the number of beams",
        absent="`n`",
    )
    length_penalty: float = parameter(
        1.0,
        number(-10, 10),
        "for beams: the score of a finished beam is divided by its length to this power",
    )
    early_stopping: str = parameter(
        "false",
        EARLY_STOPPING,
        "for beams: true ends the search once `best_of` beams are finished, false once a better "
        "one is unlikely, `never` once a better one is impossible",
    )
    num_beam_groups: int = parameter(
        1,
        between(1, MOST_OUTPUTS),
        "divides the beams into this many groups, each with its own search",
    )
    diversity_penalty: float = parameter(
        0.0,
        number(0, 100),
        "for beam groups: subtracted from a token's score for each beam of an earlier group that "
        "chose the token in the same step",
    )
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a client may request beside how tokens are chosen: the gateway's part of the table.

    `cache_salt`: once the gateway has keyed it with the tenant, not as the client wrote it.
    """

    n: int = parameter(
        1,
        between(1, MOST_OUTPUTS),
        "number of samples of the prompt; each has its own stream and result",
    )
    cache_salt: str = parameter(
        "",
        text_like("[A-Za-z0-9_.-]{1,64}", "1 to 64 of A-Z a-z 0-9 _ . -"),
        "cached prefixes are shared only with requests that have the same salt",
    )
    include_stop_str_in_output: bool = parameter(
        False, FLAG, "the text includes the stop string, or the stop id's text"
    )
    skip_special_tokens: bool = parameter(
        True, FLAG, "false: the text includes special tokens, except those that end it"
    )
    add_special_tokens: bool = parameter(
        True,
        FLAG,
        "false: the tokenizer's special tokens are not added to a text prompt",
        absent="true; for chats: false",
    )


def _parameters_of(table: type) -> Mapping[str, Parameter]:
    """The parameters among the fields of a dataclass, by name."""
    fields = dataclasses.fields(table)
    return {f.name: f.metadata["parameter"] for f in fields if "parameter" in f.metadata}


SAMPLING = _parameters_of(SamplingParams)
OPTIONS = _parameters_of(RequestOptions)
