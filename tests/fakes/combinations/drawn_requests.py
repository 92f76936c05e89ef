"""Random requests with all features of an engine; prompts share prefixes and a few cache salts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from baton.core.request.constraint import Constraint, ConstraintKind
from baton.core.request.request import Adapter, Request
from baton.core.request.sampling_params import SamplingParams

from ..speculation.eagle3_heads import VOCAB

EOS, FIRST_ID = 2, 3
LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]:,"\u0120.-_ABCDEFGHIJKLMN'  # \u0120: a blank
CONSTRAINTS = (
    Constraint(ConstraintKind.REGEX, "[a-z]{3}(-[a-f0-9]{1,9})+"),
    Constraint(ConstraintKind.REGEX, "(ab ?)+"),
    Constraint.choice(["abcabcabc", "abcabd", "b"]),
    Constraint(
        ConstraintKind.JSON_SCHEMA,
        '{"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}, '
        '"b": {"enum": ["yes", "no"]}}, "required": ["a", "b"], "additionalProperties": false}',
    ),
)
Choices = dict[str, tuple[float, Sequence[Any]]]  # how often a parameter is set, and its values


def drawn_requests(draw: random.Random, adapters: Iterable[Adapter]) -> list[Request]:
    prefixes, salts = [_ids(draw, 40), _ids(draw, 40), []], ["", "", "s"]
    found = []
    for index in range(draw.randint(4, 12)):
        prompt = [*draw.choice(prefixes), *_ids(draw, draw.choice((3, 9, 30)))]
        sampling = _drawn_sampling(draw, prompt)
        adapter = draw.choice([None, *adapters])
        num_forks = draw.choice((0, 0, 0, 1, 3))
        if sampling.use_beam_search:
            adapter, num_forks = None, draw.randrange(sampling.best_of)
        request = Request(
            f"r{index}",
            0,
            tuple(prompt),
            sampling,
            cache_salt=draw.choice(salts),
            fork_ids=tuple(f"r{index}f{fork}" for fork in range(num_forks)),
            caller_id=draw.randrange(3),
            adapter=adapter,
        )
        found.append(request)
    return found


def _ids(draw: random.Random, most: int) -> list[int]:
    return [draw.randrange(FIRST_ID, VOCAB) for _ in range(draw.randint(1, most))]


def _drawn_sampling(draw: random.Random, prompt: Sequence[int]) -> SamplingParams:
    max_tokens = draw.choice((1, 2, 9, 20, 40, 50))
    choices: Choices = {
        "logprobs": (0.5, (0, 3)),
        "prompt_logprobs": (0.25, (0, 2)),
        "repetition_penalty": (0.2, (0.6, 1.8)),
        "presence_penalty": (0.1, (2.0,)),
        "frequency_penalty": (0.2, (-1.0, 2.0)),
        "logit_bias": (0.2, (((prompt[-1], 4.0), (EOS, 3.0)), ((EOS, -100.0),))),
        "min_tokens": (0.3, range(max_tokens + 1)),
        "stop_token_ids": (0.3, (tuple(draw.sample(range(FIRST_ID, VOCAB), 3)),)),
        "ignore_eos": (0.2, (True,)),
        "tbt_target_ms": (0.2, (5.0, 50.0)),
    }
    is_search = draw.random() < 0.15
    choices |= _BEAMS if is_search else _SAMPLES
    fields = {
        name: draw.choice(values)
        for name, (chance, values) in choices.items()
        if draw.random() < chance
    }
    if "constraint" in fields:
        fields.pop("ignore_eos", None)  # EOS ends a match: the two exclude each other
    elif not is_search and draw.random() < 0.15:
        fields["allowed_token_ids"] = tuple(draw.sample(range(VOCAB), draw.choice((1, 4, 40))))
    fields |= {"use_beam_search": True} if is_search else {"seed": draw.randrange(99)}
    return SamplingParams(**({"max_tokens": max_tokens, "temperature": 0.0} | fields))


_SAMPLES: Choices = {
    "constraint": (0.25, CONSTRAINTS),
    "speculative": (0.2, (False,)),
    "temperature": (0.5, (0.4, 1.0)),
    "top_k": (0.3, (1, 5)),
    "top_p": (0.3, (0.3, 0.9)),
    "min_p": (0.2, (0.1,)),
}
_BEAMS: Choices = {
    "best_of": (1.0, (2, 4)),
    "length_penalty": (0.5, (0.0, -1.0, 2.0)),
    "early_stopping": (0.6, ("true", "never")),
}
