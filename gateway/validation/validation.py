"""The validator of requests to the served model: checks all fields, and fills in defaults.

    GenerateRequest ── ids, ranges ──► (tokenise) ── lengths, defaults, seed ──► ValidatedRequest

Errors name the field at fault by the client's name. Parameters are checked by their kinds in the
table of sampling_params.py, whose limits are vLLM's where it has some, and tighter where a public
endpoint needs it. Knows no node: the capacity of the deployment is passed in as `ModelLimits`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from google.protobuf.message import Message

from ...core.errors import ContextLengthExceeded, InvalidRequest, PromptTooLarge
from ...core.request.request import Adapter
from ...core.request.sampling_params import (
    OPTIONS,
    SAMPLING,
    Parameter,
    RequestOptions,
    SamplingParams,
)
from ...core.request.text_parameters import LABEL, check_in_vocabulary
from ...core.request.token_ids import column
from ...proto.codec import constraint_from_wire, given, token_ids_from_wire
from ...proto.v1 import common_pb2, inference_pb2
from ..text.no_tokenizer import NoTokenizer, no_text
from ..text.special_tokens import Spans
from ..text.tokenizer import Tokenizer
from .beams import OF_SEARCHES, complete_search
from .constraints import check_constraint
from .served_model import ModelLimits

_DEFAULT_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request that the deployment can serve. `label`: the caller's name for it."""

    prompt_token_ids: array[int]  # read only
    sampling: SamplingParams
    label: str
    options: RequestOptions = _DEFAULT_OPTIONS
    tenant: str = ""
    caller_id: int = 0
    adapter: Adapter | None = None

    @property
    def adapter_digest(self) -> str:
        """The digest of its adapter, or empty."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def num_samples(self) -> int:
        """The number of the call's sessions: `n`, or `best_of` without beams, whose `n` best are
        returned."""
        n, sampling = self.options.n, self.sampling
        return n if sampling.use_beam_search else max(n, sampling.best_of)


async def validated(
    wire: inference_pb2.GenerateRequest,
    limits: ModelLimits,
    tokenizer: Tokenizer | NoTokenizer,
    *,
    drawn_seed: int,
    adapters: Mapping[str, Adapter] = MappingProxyType({}),
    special_at: Spans | None = None,
) -> ValidatedRequest:
    """Check every field, tokenise the text, and fill in the defaults of absent fields. Not checked
    here: the model's name (Caller) and whether a constraint compiles (ConstraintCheck).

    `max_tokens` defaults to the rest of the context, or of the largest decode pool if that is
    smaller. `adapters`: by name. `special_at`: see Tokenizer.encode. Raises InvalidRequest, also
    for text if there is no tokenizer, ContextLengthExceeded, PromptTooLarge.
    """
    if wire.request_id:
        LABEL.check(wire.request_id, "request_id", limits.vocab_size)
    prompt = _token_ids(wire, limits.vocab_size)
    options = RequestOptions(**_checked(wire, OPTIONS, limits.vocab_size))
    adapter = adapters.get(wire.model)
    sampling = check_sampling(wire.sampling, limits.vocab_size, options.n, drawn_seed)
    if not OF_SEARCHES.isdisjoint(field.name for field, _ in wire.sampling.ListFields()):
        sampling = complete_search(sampling, wire.sampling, options.n, adapter)
    if sampling.stop and isinstance(tokenizer, NoTokenizer):
        raise no_text("stop")
    if wire.text:
        encoded = await tokenizer.encode(
            wire.text,
            adds_special_tokens=options.add_special_tokens,
            special_at=special_at,
            max_tokens=limits.max_model_len,
        )
        prompt = _prompt_of_text(encoded, limits.vocab_size)
    if not prompt:
        raise InvalidRequest("the prompt is empty", "prompt", "empty_prompt")
    given = sampling.max_tokens if wire.sampling.HasField("max_tokens") else None
    max_tokens = _fitting_max_tokens(len(prompt), given, limits)
    if sampling.min_tokens > max_tokens:
        message = f"min_tokens {sampling.min_tokens} is more than the {max_tokens} possible"
        raise InvalidRequest(message, "min_tokens", "invalid_value")
    sampling = replace(sampling, max_tokens=max_tokens)
    return ValidatedRequest(prompt, sampling, wire.request_id, options, adapter=adapter)


def _token_ids(wire: inference_pb2.GenerateRequest, vocab_size: int) -> array[int]:
    """The prompt's ids; none of a text. Raises InvalidRequest."""
    if wire.WhichOneof("prompt") is None:
        raise InvalidRequest("give a prompt: text or token ids", "prompt", "missing_required")
    ids = wire.token_ids
    if ids.packed and ids.ids:
        raise InvalidRequest("give token_ids as ids or packed, not both", "prompt", "invalid_value")
    # A slice is copied at once, the field itself id by id.
    token_ids = token_ids_from_wire(ids.packed) if ids.packed else column(ids.ids[:])
    check_token_ids(token_ids, vocab_size, "prompt")
    return token_ids


def _prompt_of_text(encoded: Sequence[int], vocab_size: int) -> array[int]:
    """The prompt of a tokenised text. Raises InvalidRequest for tokens that the model lacks."""
    prompt = column(encoded)
    if prompt and (largest := int(np.max(prompt))) >= vocab_size:
        message = f"prompt has token {largest}; the vocabulary has {vocab_size} ids"
        raise InvalidRequest(message, "prompt", "invalid_token_id")
    return prompt


def _fitting_max_tokens(num_prompt: int, max_tokens: int | None, limits: ModelLimits) -> int:
    """`max_tokens` or its default; raises if prompt and output do not fit."""
    context = limits.max_model_len
    if num_prompt + (max_tokens or 1) > context:
        wanted = "1 token at least" if max_tokens is None else f"max_tokens {max_tokens}"
        raise ContextLengthExceeded(
            f"prompt ({num_prompt} tokens) + {wanted} is more than the context of {context} tokens",
            param="prompt" if num_prompt >= context else "max_tokens",
        )
    prompt_room = context if limits.max_prompt_tokens is None else limits.max_prompt_tokens
    total_room = context if limits.max_total_tokens is None else limits.max_total_tokens
    if num_prompt > prompt_room or num_prompt + (max_tokens or 1) > total_room:
        raise PromptTooLarge(
            f"prompt ({num_prompt} tokens) and max_tokens ({max_tokens or 1}) fit the context but "
            f"no KV pool here: prefill nodes hold {prompt_room}, decode nodes {total_room} tokens",
            param="prompt",
        )
    return min(context, total_room) - num_prompt if max_tokens is None else max_tokens


def check_sampling(
    wire: common_pb2.SamplingParams, vocab_size: int, n: int = 1, seed: int = 0
) -> SamplingParams:
    """The parameters of `n` samples. Absent ones have the default of SamplingParams, but `best_of`
    is `n`, and `seed` is the one given here. Raises InvalidRequest."""
    checked = {"best_of": n, "seed": seed} | _checked(wire, SAMPLING, vocab_size)
    constraint = constraint_from_wire(wire)
    if constraint is not None:
        check_constraint(constraint, wire)
    sampling = SamplingParams(**checked, constraint=constraint)
    stop_ids, allowed = sampling.stop_token_ids, sampling.allowed_token_ids
    leaves_none = set(allowed) <= set(stop_ids) if allowed else len(stop_ids) == vocab_size
    if sampling.min_tokens and leaves_none:
        message = "min_tokens leaves no token: all are stop ids"
        raise InvalidRequest(message, "min_tokens", "invalid_value")
    return sampling


def _checked(wire: Message, table: Mapping[str, Parameter], vocab_size: int) -> dict[str, Any]:
    """The checked values of those parameters of the table that are set."""
    return {
        name: table[name].kind.check(value, name, vocab_size)
        for name, value in given(wire, table).items()
    }


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest naming the first id that is not in the vocabulary."""
    if token_ids and np.max(token_ids) >= vocab_size:  # numpy reads a column without a copy
        check_in_vocabulary(token_ids, vocab_size, param)
