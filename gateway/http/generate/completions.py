"""POST /v1/completions: a prompt, or several, continued. A prompt is a text or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest
from ....core.request.json_fields import BOOLEAN, STRING, TOKEN_IDS, FieldKind, invalid, list_of
from ....core.request.token_ids import pack
from ....proto.v1 import inference_pb2
from ...admission.front_door import RunningCall
from ...request.output_chunk import OutputChunk
from ..protocol.answers import Completion
from ..protocol.app_state import APP_STATE
from .completion_shape import CompletionOptions, CompletionSample, EchoedPrompt
from .request_fields import COMMON, LOGPROBS, MAX_TOKENS, generate_request, read_body
from .responses import Response, Sample
from .structured import constraint_of

ROUTES = web.RouteTableDef()

MAX_PROMPTS = 64

Prompt = str | list[int]


def _prompts(value: Any, name: str) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid(name, "a text, token ids, or a list of either")
    if not value:
        raise InvalidRequest(f"{name} is empty", name, "empty_prompt")
    if not isinstance(value[0], str | list):
        return [TOKEN_IDS.read(value, name)]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"{name} has more than {MAX_PROMPTS} prompts", name, "array_too_long")
    if isinstance(value[0], str):
        return [_text(item, f"{name}[{i}]") for i, item in enumerate(value)]
    return [TOKEN_IDS.read(item, f"{name}[{i}]") for i, item in enumerate(value)]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise invalid(name, "a text, like the first of the list")
    return value


_TEXT = STRING.within(minLength=1)
_IDS = TOKEN_IDS.within(minItems=1)
PROMPTS = FieldKind(
    {
        "anyOf": [
            _TEXT.schema,
            _IDS.schema,
            *(list_of(one, MAX_PROMPTS).within(minItems=1).schema for one in (_TEXT, _IDS)),
        ]
    },
    _prompts,
)

REQUIRED = ("model", "prompt")
FIELDS: Mapping[str, FieldKind] = {
    **COMMON,
    "prompt": PROMPTS,
    "max_tokens": MAX_TOKENS,
    "logprobs": LOGPROBS,
    "echo": BOOLEAN,
}
_DEFAULT_MAX_TOKENS = 16
_MAX_CHOICES = 128


@ROUTES.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """Continue a prompt, or each of several."""
    return await _Completions(request, await read_body(request, FIELDS, REQUIRED)).run()


class _Completions(Response):
    id_prefix = "cmpl-"
    answer_type = chunk_type = Completion

    def __init__(self, request: web.Request, found: Mapping[str, Any]) -> None:
        self._texts = found["prompt"]
        constraint, asked_by = constraint_of(found)
        super().__init__(request, found)
        self._options = CompletionOptions(
            echo=found.get("echo", False),
            logprobs=found.get("logprobs"),
            prompt_logprobs=found.get("prompt_logprobs"),
            return_token_ids=found.get("return_token_ids", False),
        )
        self._check(self._options)
        self.names = {"constraint": asked_by}
        sampling = {"max_tokens": _DEFAULT_MAX_TOKENS} | constraint
        sampling |= {name: found[name] for name in ("max_tokens", "logprobs") if name in found}
        if "logprobs" in found and self._options.echo and "prompt_logprobs" not in found:
            sampling["prompt_logprobs"] = found["logprobs"]
            self.names["prompt_logprobs"] = "logprobs"
        self.prompts = [
            generate_request(found, sampling, request_id=self.label, **_prompt(text))
            for text in self._texts
        ]
        self._prompts: list[EchoedPrompt] = []

    def _check(self, options: CompletionOptions) -> None:
        """What the wire can carry, and this endpoint cannot answer."""
        if self.num_samples * len(self._texts) > _MAX_CHOICES:
            message = f"prompts times n are more than {_MAX_CHOICES}"
            raise InvalidRequest(message, "n", "invalid_value")
        if (
            self.is_stream
            and options.echo
            and options.logprobs is not None
            and self.num_samples > 1
        ):
            message = "echo with logprobs streams one sample of a prompt"
            raise InvalidRequest(message, "n", "invalid_value")

    def names_of(self, prompt_index: int) -> Mapping[str, str]:
        name = "prompt" if len(self._texts) == 1 else f"prompt[{prompt_index}]"
        return {"prompt": name, **self.names}

    async def samples(self, calls: Sequence[RunningCall]) -> Sequence[Sample]:
        tokenizer = self.app[APP_STATE].door.model.tokenizer
        for text, call in zip(self._texts, calls, strict=True):
            shown = text if self._options.echo else ""
            if not isinstance(shown, str):
                shown = await tokenizer.decode(shown)
            self._prompts.append(EchoedPrompt(shown, call.request.prompt_token_ids))
        return [
            CompletionSample(
                place * self.num_samples + sample, self._options, prompt, tokenizer.token
            )
            for place, prompt in enumerate(self._prompts)
            for sample in range(self.num_samples)
        ]

    def first_chunk(self, prompt_index: int, chunk: OutputChunk) -> None:
        self._prompts[prompt_index].scores = chunk.prompt_logprobs


def _prompt(prompt: Prompt) -> Mapping[str, Any]:
    """The prompt's field of a GenerateRequest."""
    if isinstance(prompt, str):
        return {"text": prompt}
    return {"token_ids": inference_pb2.TokenIds(packed=pack(prompt))}
