"""POST /v1/chat/completions: messages become a prompt by the chat template, output a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest
from ....core.request.json_fields import BOOLEAN, FieldKind
from ...admission.running_call import RunningCall
from ...request.output_chunk import OutputChunk
from ..generate.generated_answer import GeneratedAnswer, Sample, prompt_logprobs
from ..generate.request_fields import COMMON, LOGPROBS, MAX_TOKENS, Body, generate_request
from ..protocol.answers import ChatCompletion, ChatCompletionChunk
from ..protocol.app_state import APP_STATE
from .chat_model import CHAT_MODEL, Prepared, constraint_behind, prepare
from .chat_sample import ChatSample
from .chat_template import ENDINGS, VARIABLES
from .messages import MESSAGES
from .reasoning import REASONING, ReasoningParser
from .tools import TOOL_CHOICE, TOOLS

ROUTES = web.RouteTableDef()

_FIELDS: Mapping[str, FieldKind] = {
    **COMMON,
    "messages": MESSAGES,
    "max_tokens": MAX_TOKENS,
    "max_completion_tokens": MAX_TOKENS,
    "logprobs": BOOLEAN,
    "top_logprobs": LOGPROBS,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": BOOLEAN,
    "chat_template_kwargs": VARIABLES,
    **ENDINGS,
    **REASONING,
}
BODY = Body(_FIELDS, ("model", "messages"))


@ROUTES.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Generate the answer in a chat."""
    found = await BODY.read(request)
    _check(found)
    return await Chat(request, found, await prepare(request, found)).run()


def _check(found: Mapping[str, Any]) -> None:
    """Refuse combinations of fields that are each valid."""
    if "top_logprobs" in found and not found.get("logprobs"):
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    most = found.get("max_completion_tokens")
    if most is not None and found.get("max_tokens", most) != most:
        message = "max_tokens and max_completion_tokens differ: give one"
        raise InvalidRequest(message, "max_tokens", "invalid_value")


class Chat(GeneratedAnswer):
    id_prefix = "chatcmpl-"
    answer_type = ChatCompletion
    chunk_type = ChatCompletionChunk

    def __init__(self, request: web.Request, found: Mapping[str, Any], prepared: Prepared) -> None:
        super().__init__(request, found)
        model, door = self.app[CHAT_MODEL], self.app[APP_STATE].door
        constraint, constrained_by = constraint_behind(found, prepared, model, door.limits)
        max_tokens_name = "max_tokens"
        if "max_completion_tokens" in found:
            max_tokens_name = "max_completion_tokens"
        sampling: dict[str, Any] = {**constraint, "max_tokens": found.get(max_tokens_name)}
        if found.get("logprobs"):
            sampling["logprobs"] = found.get("top_logprobs", 0)
        self.names = {
            "prompt": "messages",
            "max_tokens": max_tokens_name,
            "logprobs": "top_logprobs",
            "constraint": constrained_by,
        }
        wire = generate_request(
            found,
            sampling,
            request_id=self.label,
            text=prepared.prompt.text,
            add_special_tokens=False,
        )
        if prepared.tool_format or model.reasoning:
            wire.skip_special_tokens = False  # the tags of calls and reasoning may be special
        self.prompts = [wire]
        self.special_at = prepared.prompt.special_at
        self._found = found
        self._prepared = prepared
        self._token_of = door.model.tokenizer.token
        self._prompt_ids: Sequence[int] = ()

    async def samples(self, calls: Sequence[RunningCall]) -> Sequence[Sample]:
        self._prompt_ids = calls[0].record.request.prompt_token_ids
        if self._found.get("return_token_ids"):
            self.extra["prompt_token_ids"] = list(self._prompt_ids)
        return [self.new_sample(index) for index in range(self.num_samples)]

    def new_sample(self, index: int) -> ChatSample:
        """A sample whose text is parsed in the served model's formats of reasoning and calls."""
        prepared, model = self._prepared, self.app[CHAT_MODEL]
        tags, calls = model.reasoning, prepared.tool_format
        return ChatSample(
            index,
            self._found,
            self._token_of,
            model.entropy.new_id,
            parser=None if calls is None else calls.parser(self._found.get("tools", [])),
            opening=prepared.opening,
            reasoning=None if tags is None else ReasoningParser(tags, prepared.start),
        )

    def first_chunk(self, prompt_index: int, chunk: OutputChunk) -> None:
        if "prompt_logprobs" in self._found:
            scores = prompt_logprobs(self._prompt_ids, chunk.prompt_logprobs, self._token_of)
            self.extra["prompt_logprobs"] = scores
