"""The fields of OpenAI's requests: what they can be, and where in a GenerateRequest they go.

    SAMPLING   by the same name in its `sampling`          GENERATION   by the same name beside it
    the rest is what one endpoint reads by itself
The first two are made from the table of request parameters. Unknown fields are ignored and logged.
Fields that would change the answer, and that are not supported or another endpoint's, are refused;
so are names of internals, which no client may set.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest
from ....core.request import request
from ....core.request.json_fields import BOOLEAN, STRING, FieldKind, invalid, options, string
from ....proto.v1 import common_pb2, inference_pb2
from ..protocol.body import read_object
from .structured import STRUCTURED

log = logging.getLogger(__name__)

_MAX_PAIRS, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512


def _metadata(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid(name, "an object")
    if len(value) > _MAX_PAIRS:
        raise invalid(name, f"an object of at most {_MAX_PAIRS} pairs")
    for key, text in value.items():
        is_short = isinstance(text, str) and len(text) <= _MAX_VALUE_CHARS
        if len(key) > _MAX_KEY_CHARS or not is_short:
            what = f"keys of {_MAX_KEY_CHARS} and texts of {_MAX_VALUE_CHARS} characters at most"
            raise invalid(name, f"an object with {what}")
    return value


SAMPLING = {name: one.field for name, one in request.SAMPLING.items() if not one.over_http}
GENERATION = {name: one.field for name, one in request.OPTIONS.items()}
MAX_TOKENS = request.SAMPLING["max_tokens"].field
LOGPROBS = request.SAMPLING["logprobs"].field

FRONT: Mapping[str, FieldKind] = {
    "model": STRING,
    "stream": BOOLEAN,
    "stream_options": options(
        include_usage=BOOLEAN, continuous_usage_stats=BOOLEAN, include_obfuscation=BOOLEAN
    ),
    "return_token_ids": BOOLEAN,
    "user": string(512),
    "metadata": FieldKind(
        {
            "type": "object",
            "propertyNames": {"maxLength": _MAX_KEY_CHARS},
            "additionalProperties": {"type": "string", "maxLength": _MAX_VALUE_CHARS},
            "maxProperties": _MAX_PAIRS,
        },
        _metadata,
    ),
}

COMMON = {**FRONT, **SAMPLING, **GENERATION, **STRUCTURED}  # of both endpoints that generate

# Known, and not supported where an endpoint's table lacks them: (name, values that change nothing
# and are let pass).
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "bad_words": ([],),
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "functions": ([],),
    "include": ([], ["reasoning.encrypted_content"]),  # none is encrypted
    "instructions": ("",),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "output_config": ({},),
    "parallel_tool_calls": (True, False),
    "priority": (0,),
    "reasoning": ({},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "stop_sequences": ([],),
    "store": (False,),
    "suffix": ("",),
    "system": ("", []),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    **dict.fromkeys(
        (
            *("allowed_token_ids", "audio", "chat_template", "enable_thinking", "function_call"),
            *(
                "guided_decoding_backend",
                "input",
                "json_schema",
                "max_completion_tokens",
                "max_output_tokens",
                "messages",
            ),
            *("prediction", "previous_response_id", "prompt", "prompt_embeds", "reasoning_effort"),
            *(
                "thinking",
                "thinking_budget",
                "thinking_token_budget",
                "top_logprobs",
                "truncate_prompt_tokens",
                "verbosity",
                "web_search_options",
            ),
        ),
        (),
    ),
}

# Beside these, of /v1/responses and /v1/messages.
UNSUPPORTED_IN_TURNS: Mapping[str, Sequence[Any]] = {
    **UNSUPPORTED,
    "logprobs": (False,),
    "n": (1,),
    "prompt_logprobs": (),
    "response_format": (),
    "return_token_ids": (False,),
    "top_logprobs": (0,),
}

# What does the same, or comes nearest, in chats and completions.
INSTEAD: Mapping[str, str] = {
    "allowed_token_ids": "structured_outputs bounds what can come, logit_bias favours tokens",
    "bad_words": "logit_bias of -100 keeps a token out",
    "chat_template": "the model's own template is used; /v1/completions takes a finished prompt",
    "chat_template_kwargs": "/v1/chat/completions takes them",
    "enable_thinking": "/v1/chat/completions takes it",
    "documents": "put them into a message",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "input": "/v1/responses takes it",
    "instructions": "/v1/responses takes them; chats have system messages",
    "json_schema": "use response_format",
    "logprob_token_ids": "use logprobs",
    "max_completion_tokens": "the name is max_tokens",
    "max_output_tokens": "the name is max_tokens",
    "messages": "/v1/chat/completions takes them",
    "output_config": "use response_format and reasoning_effort",
    "previous_response_id": "/v1/responses takes it",
    "prompt": "/v1/completions takes one",
    "reasoning": "use reasoning_effort",
    "reasoning_effort": "/v1/chat/completions takes it",
    "stop_sequences": "the name is stop",
    "suffix": "put it into the prompt as the model was taught",
    "system": "put a system message in front of the others",
    "text": "use response_format",
    "thinking": "use enable_thinking and thinking_token_budget",
    "thinking_budget": "the name is thinking_token_budget",
    "thinking_token_budget": "/v1/chat/completions takes it",
    "tool_choice": "/v1/chat/completions takes it",
    "tools": "/v1/chat/completions takes them",
    "top_logprobs": "logprobs is their number",
    "truncate_prompt_tokens": "/tokenize counts a prompt's tokens",
    "verbosity": "max_tokens bounds an answer, and a message can ask for a short one",
}

INSTEAD_IN_TURNS: Mapping[str, str] = {
    **INSTEAD,
    **dict.fromkeys(
        ("logprobs", "logprob_token_ids", "prompt_logprobs", "top_logprobs"),
        "/v1/chat/completions takes logprobs",
    ),
}

INTERNAL = frozenset(
    (
        *("attempt", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
        *("data_parallel_rank", "decode_node", "disagg_prefill_dp_rank", "fork_request_ids"),
        *("incarnation", "kv_transfer_params", "lora_path", "media_io_kwargs", "mm_hashes"),
        *("mm_processor_kwargs", "prefill_node", "routed_dp_rank", "sample_index", "tenant"),
        *("ticket", "transfer_id"),
    )
)

_MAX_LOGGED = 16


def read_fields(
    body: Mapping[str, Any],
    known: Mapping[str, FieldKind],
    unsupported: Mapping[str, Sequence[Any]] = UNSUPPORTED,
    instead: Mapping[str, str] = INSTEAD,
    required: Sequence[str] = (),
) -> dict[str, Any]:
    """The fields that are there, read; a required text is not empty. Raises InvalidRequest for what
    cannot be served."""
    found: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        if value is None:
            continue
        if (kind := known.get(name)) is not None:
            found[name] = kind.read(value, name)
        elif name in INTERNAL:
            raise InvalidRequest(f"there is no parameter {name}", name, "unknown_parameter")
        elif name in unsupported:
            _check_harmless(name, value, unsupported[name], instead.get(name))
        else:
            ignored.append(name[:64])
    if ignored:
        log.info("unknown fields were ignored: %r", ignored[:_MAX_LOGGED])
    for name in required:
        require({} if found.get(name) == "" else found, name)
    return found


def _check_harmless(name: str, value: Any, harmless: Sequence[Any], instead: str | None) -> None:
    if not any(type(value) is type(h) and value == h for h in harmless):
        message = f"{name} is not supported here" + (f": {instead}" if instead else "")
        raise InvalidRequest(message, name, "unsupported_parameter")


async def read_body(
    request: web.Request,
    known: Mapping[str, FieldKind],
    required: Sequence[str],
    unsupported: Mapping[str, Sequence[Any]] = UNSUPPORTED,
    instead: Mapping[str, str] = INSTEAD,
) -> dict[str, Any]:
    """`read_fields` of a request's body. Raises InvalidRequest, Refusal."""
    return read_fields(await read_object(request), known, unsupported, instead, required)


def require(found: Mapping[str, Any], name: str) -> Any:
    """Raises InvalidRequest where the field is absent or null."""
    if name not in found:
        raise InvalidRequest(f"{name} is required", name, "missing_required")
    return found[name]


def generate_request(
    found: Mapping[str, Any], sampling: dict[str, Any], **fields: Any
) -> inference_pb2.GenerateRequest:
    """The message of one prompt; `sampling`, `fields`: what an endpoint reads by itself."""
    chosen = {name: found[name] for name in SAMPLING if name in found} | sampling
    beside = {name: found[name] for name in GENERATION if name in found}
    return inference_pb2.GenerateRequest(
        model=found["model"],
        sampling=common_pb2.SamplingParams(**chosen),
        **fields | beside,
    )
