"""The fields of OpenAI's requests, one line each: what they can be, and where in a GenerateRequest
they go.

    SAMPLING   by the same name in its `sampling`          GENERATION   by the same name beside it
    the rest is what one endpoint reads by itself
Unknown fields are ignored and logged. Fields that would change the answer, and that are not
supported or another endpoint's, are refused; so are names of internals, which no client may set.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ....core.errors import InvalidRequest
from ....proto.v1 import inference_pb2
from ...validation.sampling_validation import (
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
)
from ...validation.validation import MAX_SAMPLES
from .json_fields import (
    BOOLEAN,
    NUMBER,
    STRING,
    UINT32_MAX,
    FieldKind,
    integer,
    one_or_list_of,
    options,
    string,
)
from .prompts import TOKEN_IDS
from .special_fields import LOGIT_BIAS, METADATA, TOP_K

log = logging.getLogger(__name__)

_COUNT = integer(0, UINT32_MAX)
MAX_TOKENS = integer(1, UINT32_MAX)
LOGPROBS = _COUNT.within(maximum=MAX_LOGPROBS)
_PENALTY = NUMBER.within(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)

SAMPLING: Mapping[str, FieldKind] = {
    "temperature": NUMBER.within(minimum=0, maximum=MAX_TEMPERATURE),
    "top_p": NUMBER.within(exclusiveMinimum=0, maximum=1),
    "top_k": TOP_K,
    "min_p": NUMBER.within(minimum=0, maximum=1),
    "seed": integer(0, 2**63 - 1),
    "stop": one_or_list_of(STRING.within(minLength=1, maxLength=256), MAX_STOP_STRINGS),
    "stop_token_ids": FieldKind(
        {**TOKEN_IDS.schema, "maxItems": MAX_STOP_TOKEN_IDS}, TOKEN_IDS.read
    ),
    "ignore_eos": BOOLEAN,
    "repetition_penalty": NUMBER.within(exclusiveMinimum=0, maximum=MAX_PENALTY),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": LOGIT_BIAS,
    "min_tokens": _COUNT,
    "prompt_logprobs": LOGPROBS,
}

GENERATION: Mapping[str, FieldKind] = {
    "n": integer(1, MAX_SAMPLES),
    "cache_salt": STRING.within(pattern=r"^[A-Za-z0-9_.-]{1,64}$"),
    "include_stop_str_in_output": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "add_special_tokens": BOOLEAN,
}

FRONT: Mapping[str, FieldKind] = {
    "model": STRING,
    "stream": BOOLEAN,
    "stream_options": options(include_usage=BOOLEAN, continuous_usage_stats=BOOLEAN),
    "return_token_ids": BOOLEAN,
    "user": string(512),
    "metadata": METADATA,
}

# Known, and not supported where an endpoint's table lacks them: (name, values that ask for nothing
# and are let pass).
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": (),
    "functions": (),
    "guided_decoding_backend": (),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "max_completion_tokens": (),
    "messages": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "prompt": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

# What does the same here, or comes nearest.
INSTEAD: Mapping[str, str] = {
    "allowed_token_ids": "structured_outputs bounds what can come, logit_bias favours tokens",
    "bad_words": "logit_bias of -100 keeps a token out",
    "best_of": "n gives several samples",
    "chat_template": "the model's own template is used; /v1/completions takes a finished prompt",
    "chat_template_kwargs": "the model's template is given messages and tools alone; "
    "/v1/completions takes a finished prompt",
    "documents": "put them into a message",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "json_schema": "use response_format",
    "logprob_token_ids": "use logprobs",
    "max_completion_tokens": "the name is max_tokens",
    "messages": "/v1/chat/completions takes them",
    "prompt": "/v1/completions takes one",
    "reasoning_effort": "there are no levels of reasoning; max_tokens bounds an answer, and a "
    "message can ask for a short one",
    "suffix": "put it into the prompt as the model was taught",
    "tool_choice": "/v1/chat/completions takes it",
    "tools": "/v1/chat/completions takes them",
    "top_logprobs": "logprobs is their number",
    "truncate_prompt_tokens": "/tokenize counts a prompt's tokens",
    "verbosity": "max_tokens bounds an answer, and a message can ask for a short one",
}

INTERNAL = frozenset(
    {
        "attempt",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "decode_node",
        "disagg_prefill_dp_rank",
        "fork_request_ids",
        "incarnation",
        "kv_transfer_params",
        "lora_path",
        "media_io_kwargs",
        "mm_hashes",
        "mm_processor_kwargs",
        "prefill_node",
        "routed_dp_rank",
        "sample_index",
        "tenant",
        "ticket",
        "transfer_id",
    }
)

_MAX_LOGGED = 16


def read_fields(body: Mapping[str, Any], known: Mapping[str, FieldKind]) -> dict[str, Any]:
    """The fields that are there, read; raises InvalidRequest for what cannot be served."""
    found: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        if value is None:
            continue
        if (kind := known.get(name)) is not None:
            found[name] = kind.read(value, name)
        elif name in INTERNAL:
            raise InvalidRequest(
                f"there is no parameter {name}", param=name, code="unknown_parameter"
            )
        elif name in UNSUPPORTED:
            _check_harmless(name, value)
        else:
            ignored.append(name[:64])
    if ignored:
        log.info("unknown fields were ignored: %r", ignored[:_MAX_LOGGED])
    return found


def _check_harmless(name: str, value: Any) -> None:
    if not any(type(value) is type(h) and value == h for h in UNSUPPORTED[name]):
        instead = f": {INSTEAD[name]}" if name in INSTEAD else ""
        raise InvalidRequest(
            f"{name} is not supported here{instead}", param=name, code="unsupported_parameter"
        )


def require(found: Mapping[str, Any], name: str) -> Any:
    """Raises InvalidRequest where the field is absent or null."""
    if name not in found:
        raise InvalidRequest(f"{name} is required", param=name, code="missing_required")
    return found[name]


def fill(wire: inference_pb2.GenerateRequest, found: Mapping[str, Any]) -> None:
    """Put what was read of SAMPLING and GENERATION in its place."""
    for name in found.keys() & SAMPLING.keys():
        value = found[name]
        if isinstance(value, list):
            getattr(wire.sampling, name).extend(value)
        elif isinstance(value, dict):
            getattr(wire.sampling, name).update(value)
        else:
            setattr(wire.sampling, name, value)
    for name in found.keys() & GENERATION.keys():
        setattr(wire, name, found[name])
