"""The fields of OpenAI's requests: their types, and their places in a GenerateRequest.

    SAMPLING   by the same name in its `sampling`          GENERATION   by the same name beside it
    all other fields are read by single endpoints
The first two are made from the table of request parameters. Unknown fields are ignored and logged.
Fields that would change the answer are refused if they are unsupported or another endpoint's; so
are internal names, which no client may set.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aiohttp import web

from ....core.errors import InvalidRequest
from ....core.request import sampling_params
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


SAMPLING = {name: one.field for name, one in sampling_params.SAMPLING.items() if not one.over_http}
GENERATION = {name: one.field for name, one in sampling_params.OPTIONS.items()}
MAX_TOKENS = sampling_params.SAMPLING["max_tokens"].field
LOGPROBS = sampling_params.SAMPLING["logprobs"].field

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

COMMON = {**FRONT, **SAMPLING, **GENERATION, **STRUCTURED}  # of chats and completions


class Unsupported(NamedTuple):
    """A known field that is unsupported by endpoints whose tables lack it.

    `instead`: the nearest alternative, for the error message; `harmless`: values that change
    nothing and are accepted.
    """

    instead: str = ""
    harmless: Sequence[Any] = ()


UNSUPPORTED: Mapping[str, Unsupported] = {  # for chats and completions
    "add_generation_prompt": Unsupported("/v1/chat/completions takes it", (True,)),
    "bad_words": Unsupported("logit_bias of -100 keeps a token out", ([],)),
    "chat_template": Unsupported(
        "the model's own template is used; /v1/completions takes a finished prompt"
    ),
    "chat_template_kwargs": Unsupported("/v1/chat/completions takes them", ({},)),
    "continue_final_message": Unsupported("/v1/chat/completions takes it", (False,)),
    "documents": Unsupported("put them into a message", ([],)),
    "echo": Unsupported(harmless=(False,)),
    "enable_thinking": Unsupported("/v1/chat/completions takes it"),
    "function_call": Unsupported("use tool_choice"),
    "functions": Unsupported("use tools", ([],)),
    "include": Unsupported(harmless=([], ["reasoning.encrypted_content"])),  # nothing is encrypted
    "input": Unsupported("/v1/responses takes it"),
    "instructions": Unsupported("/v1/responses takes them; chats have system messages", ("",)),
    "json_schema": Unsupported("use response_format"),
    "logits_processors": Unsupported(harmless=([],)),
    "logprob_token_ids": Unsupported("use logprobs", ([],)),
    "max_completion_tokens": Unsupported("the name is max_tokens"),
    "max_output_tokens": Unsupported("the name is max_tokens"),
    "messages": Unsupported("/v1/chat/completions takes them"),
    "modalities": Unsupported(harmless=(["text"],)),
    "output_config": Unsupported("use response_format and reasoning_effort", ({},)),
    "parallel_tool_calls": Unsupported(harmless=(True, False)),
    "previous_response_id": Unsupported("/v1/responses takes it"),
    "priority": Unsupported(harmless=(0,)),
    "prompt": Unsupported("/v1/completions takes one"),
    "reasoning": Unsupported("use reasoning_effort", ({},)),
    "reasoning_effort": Unsupported("/v1/chat/completions takes it"),
    "return_tokens_as_token_ids": Unsupported(harmless=(False,)),
    "service_tier": Unsupported(harmless=("auto", "default")),
    "spaces_between_special_tokens": Unsupported(harmless=(True,)),
    "stop_sequences": Unsupported("the name is stop", ([],)),
    "store": Unsupported(harmless=(False,)),
    "suffix": Unsupported("put it into the prompt as the model was trained", ("",)),
    "system": Unsupported("put a system message in front of the others", ("", [])),
    "text": Unsupported("use response_format", ({}, {"format": {"type": "text"}})),
    "thinking": Unsupported("use enable_thinking and thinking_token_budget"),
    "thinking_budget": Unsupported("the name is thinking_token_budget"),
    "thinking_token_budget": Unsupported("/v1/chat/completions takes it"),
    "tool_choice": Unsupported("/v1/chat/completions takes it", ("none", "auto")),
    "tools": Unsupported("/v1/chat/completions takes them", ([],)),
    "top_logprobs": Unsupported("logprobs is their number"),
    "truncate_prompt_tokens": Unsupported("/tokenize counts a prompt's tokens"),
    "verbosity": Unsupported("max_tokens bounds an answer, and a message can ask for a short one"),
    **dict.fromkeys(
        ("audio", "guided_decoding_backend", "prediction", "prompt_embeds", "web_search_options"),
        Unsupported(),
    ),
}

_NO_LOGPROBS = "/v1/chat/completions takes logprobs"
# For /v1/responses and /v1/messages.
UNSUPPORTED_IN_TURNS: Mapping[str, Unsupported] = {
    **UNSUPPORTED,
    "logprob_token_ids": Unsupported(_NO_LOGPROBS, ([],)),
    "logprobs": Unsupported(_NO_LOGPROBS, (False,)),
    "n": Unsupported(harmless=(1,)),
    "prompt_logprobs": Unsupported(_NO_LOGPROBS),
    "response_format": Unsupported(),
    "return_token_ids": Unsupported(harmless=(False,)),
    "top_logprobs": Unsupported(_NO_LOGPROBS, (0,)),
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


class Body(NamedTuple):
    """The fields of a request's body, of which a `required` text must not be empty, and those that
    are `unsupported` unless they are among them."""

    fields: Mapping[str, FieldKind]
    required: Sequence[str] = ()
    unsupported: Mapping[str, Unsupported] = UNSUPPORTED

    async def read(self, request: web.Request) -> dict[str, Any]:
        """The fields that are present. Raises InvalidRequest, Refusal."""
        return self.read_fields(await read_object(request))

    def read_fields(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The same of a parsed body. Raises InvalidRequest for fields that cannot be served."""
        found: dict[str, Any] = {}
        ignored: list[str] = []
        for name, value in body.items():
            if value is None:
                continue
            if (kind := self.fields.get(name)) is not None:
                found[name] = kind.read(value, name)
            elif name in INTERNAL:
                raise InvalidRequest(f"there is no parameter {name}", name, "unknown_parameter")
            elif name in self.unsupported:
                _check_harmless(name, value, *self.unsupported[name])
            else:
                ignored.append(name[:64])
        if ignored:
            log.info("unknown fields were ignored: %r", ignored[:_MAX_LOGGED])
        for name in self.required:
            require({} if found.get(name) == "" else found, name)
        return found


def _check_harmless(name: str, value: Any, instead: str, harmless: Sequence[Any]) -> None:
    if not any(type(value) is type(h) and value == h for h in harmless):
        message = f"{name} is not supported here" + (f": {instead}" if instead else "")
        raise InvalidRequest(message, name, "unsupported_parameter")


def require(found: Mapping[str, Any], name: str) -> Any:
    """The field's value; raises InvalidRequest if it is absent or null."""
    if name not in found:
        raise InvalidRequest(f"{name} is required", name, "missing_required")
    return found[name]


def generate_request(
    found: Mapping[str, Any], sampling: dict[str, Any], **fields: Any
) -> inference_pb2.GenerateRequest:
    """The GenerateRequest of one prompt; `sampling`, `fields`: set by the endpoint itself."""
    chosen = {name: found[name] for name in SAMPLING if name in found} | sampling
    beside = {name: found[name] for name in GENERATION if name in found}
    return inference_pb2.GenerateRequest(
        model=found["model"],
        sampling=common_pb2.SamplingParams(**chosen),
        **fields | beside,
    )
