"""POST /v1/completions: a prompt, or several, continued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest
from ....core.request.token_ids import pack
from ....proto.v1 import inference_pb2
from ...admission.front_door import RunningCall
from ...request.output_chunk import OutputChunk
from ..protocol.app_state import APP_STATE
from ..protocol.body import read_object
from .completion_shape import CompletionChoice, CompletionOptions, EchoedPrompt
from .json_fields import BOOLEAN, FieldKind
from .prompts import PROMPTS, Prompt, prompt_name
from .request_fields import (
    FRONT,
    GENERATION,
    LOGPROBS,
    MAX_TOKENS,
    SAMPLING,
    fill,
    read_fields,
    require,
)
from .request_options import label_of, model_of, stream_plan
from .responses import Choice, ResponsePlan, answer
from .run_prompts import PromptsCall
from .structured import STRUCTURED, fill_constraint

ROUTES = web.RouteTableDef()

FIELDS: Mapping[str, FieldKind] = {
    **FRONT,
    **SAMPLING,
    **GENERATION,
    **STRUCTURED,
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
    found = read_fields(await read_object(request), FIELDS)
    model, prompts = model_of(found), require(found, "prompt")
    options = CompletionOptions(
        echo=found.get("echo", False),
        logprobs=found.get("logprobs"),
        prompt_logprobs=found.get("prompt_logprobs"),
        return_token_ids=found.get("return_token_ids", False),
    )
    calls = [
        _call(request, model, prompt, found, _names(found, index, len(prompts)))
        for index, prompt in enumerate(prompts)
    ]
    plan = stream_plan(found, calls)
    _check(plan, options)
    return await answer(request, plan, _Shape(request, prompts, options, plan.num_samples))


def _call(
    request: web.Request,
    model: str,
    prompt: Prompt,
    found: Mapping[str, Any],
    names: Mapping[str, str],
) -> PromptsCall:
    wire = _wire(request, model, prompt, found)
    return PromptsCall(wire, {**names, **fill_constraint(wire, found)})


def _wire(
    request: web.Request, model: str, prompt: Prompt, found: Mapping[str, Any]
) -> inference_pb2.GenerateRequest:
    wire = inference_pb2.GenerateRequest(model=model, request_id=label_of(request))
    if isinstance(prompt, str):
        wire.text = prompt
    else:
        wire.token_ids.packed = pack(prompt)
    fill(wire, found)
    wire.sampling.max_tokens = found.get("max_tokens", _DEFAULT_MAX_TOKENS)
    if "logprobs" in found:
        wire.sampling.logprobs = found["logprobs"]
        if found.get("echo") and "prompt_logprobs" not in found:
            wire.sampling.prompt_logprobs = found["logprobs"]
    return wire


def _names(found: Mapping[str, Any], index: int, num_prompts: int) -> Mapping[str, str]:
    names = {"prompt": prompt_name(index, num_prompts)}
    if found.get("echo") and "prompt_logprobs" not in found:
        names["prompt_logprobs"] = "logprobs"
    return names


def _check(plan: ResponsePlan, options: CompletionOptions) -> None:
    """What the wire can say, and this endpoint cannot answer."""
    if plan.num_samples * len(plan.calls) > _MAX_CHOICES:
        raise InvalidRequest(
            f"prompts times n are more than {_MAX_CHOICES}", param="n", code="invalid_value"
        )
    if not plan.is_stream:
        return
    if options.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs are told in a whole answer, not in a stream",
            param="prompt_logprobs",
            code="unsupported_parameter",
        )
    if options.echo and options.logprobs is not None and plan.num_samples > 1:
        raise InvalidRequest(
            "echo with logprobs streams one sample of a prompt", param="n", code="invalid_value"
        )


class _Shape:
    """`answers.Shape`."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        request: web.Request,
        prompts: Sequence[Prompt],
        options: CompletionOptions,
        num_samples: int,
    ) -> None:
        self._tokenizer = request.app[APP_STATE].door.model.tokenizer
        self._texts = prompts
        self._options = options
        self._num_samples = num_samples
        self._prompts: list[EchoedPrompt] = []

    async def begin(self, generations: Sequence[RunningCall]) -> Sequence[Choice]:
        self._prompts = [
            EchoedPrompt(await self._text(prompt), generation.request.prompt_token_ids)
            for prompt, generation in zip(self._texts, generations, strict=True)
        ]
        return [
            CompletionChoice(
                place * self._num_samples + sample, self._options, prompt, self._tokenizer.token
            )
            for place, prompt in enumerate(self._prompts)
            for sample in range(self._num_samples)
        ]

    async def _text(self, prompt: Prompt) -> str:
        if not self._options.echo:
            return ""
        return prompt if isinstance(prompt, str) else await self._tokenizer.decode(prompt)

    def first_chunk(self, prompt_index: int, chunk: OutputChunk) -> None:
        self._prompts[prompt_index].scores = chunk.prompt_logprobs

    def extra(self) -> dict[str, Any]:
        return {}
