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
from .parameters import FLAG, LIMIT, SEED, Kind, at_least, between, count, number
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

    `over_http`: the HTTP form, as text, if it has another name or meaning there.
    """

    default: Any
    kind: Kind
    help: str
    absent: str | None = None
    over_http: str = ""

    @property
    def field(self) -> FieldKind:
        """Its field in a JSON body."""
        return self.kind.field.within(description=self.help)


def parameter(default: Any, kind: Kind, help: str, **more: str) -> Any:
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


def _parameters_of(table: type) -> Mapping[str, Parameter]:
    """The parameters among the fields of a dataclass, by name."""
    fields = dataclasses.fields(table)
    return {f.name: f.metadata["parameter"] for f in fields if "parameter" in f.metadata}


SAMPLING = _parameters_of(SamplingParams)
OPTIONS = _parameters_of(RequestOptions)
