"""LLM: generates texts for prompts in this process, without a server or Redis.

    from baton import LLM, SamplingParams

    with LLM(model="demo") as llm:
        for output in llm.generate(["def fib(n):"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

Calls run one after the other; each processes all its prompts with continuous batching.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from tqdm import tqdm

from ..client.messages import GenerateParams, build_request
from ..core.config import GatewayConfig
from ..core.engine_config import EngineConfig
from ..core.errors import BatonError, InvalidRequest, StartupFailed
from ..core.flags import from_caller
from ..gateway.http.chat.chat_template import ChatPrompt, ChatTemplate, ending_of
from ..gateway.http.chat.messages import MESSAGES
from ..gateway.http.chat.tools import TOOLS, shown_tools
from ..gateway.text.no_tokenizer import NoTokenizer
from ..gateway.text.special_tokens import Spans
from ..gateway.validation.validation import ValidatedRequest
from .beam_search import BeamSearchOutput, BeamSearchParams, beams_of
from .local_calls import LocalCalls
from .loop_thread import LoopThread
from .outputs import RequestOutput, request_output
from .sampling_params import SamplingParams

log = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
_Asked = tuple[str | None, GenerateParams, Spans | None]
_ALIASES = {
    alias.replace("-", "_"): field.name
    for field in dataclasses.fields(EngineConfig)
    for alias in field.metadata.get("aliases", ())
}
# No client waits for tokens: steps may be larger than in a server.
_FOR_THROUGHPUT = {"max_num_batched_tokens": 8192}


class LLM:
    """A model, loaded once. Not thread-safe.

    `close` it, or use it as a context manager, to release GPUs and other ranks; else they are
    released when the process ends.
    """

    def __init__(
        self, model: str = "demo", *, skip_tokenizer_init: bool = False, **engine: Any
    ) -> None:
        """`engine`: fields of EngineConfig, by the names of their flags: tensor_parallel_size (or
        tp), max_model_len, gpu_memory_utilization, ...; max_num_batched_tokens defaults to 8192.
        With `skip_tokenizer_init` prompts are token ids, and outputs have no text.

        Raises StartupFailed.
        """
        if not isinstance(model, str | os.PathLike):
            raise StartupFailed(f"model cannot be {model!r:.100}: it is a name or a folder")
        named = {_ALIASES.get(name, name): value for name, value in engine.items()}
        config = from_caller(EngineConfig, {"model": model, **_FOR_THROUGHPUT, **named})
        front = GatewayConfig(model=config.model, skip_tokenizer_init=skip_tokenizer_init)
        gc.collect()  # an unreachable LLM releases its memory first
        self._thread = LoopThread("baton-engine")
        try:
            self._calls = self._thread.run(_load(self._thread, config, front))
        except BaseException:
            self._thread.close()
            raise
        self._close = weakref.finalize(self, self._thread.close, self._calls.close)
        self._template = ChatTemplate.load(self._calls.model.model_dir)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks and release all memory; any further call raises BatonError. If a rank was
        lost, GPU memory is released when the process ends."""
        self._close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt: a text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}.

        `sampling_params`: one for all prompts, or one each. Outputs are in the order of the
        prompts. Raises InvalidRequest and its kin, before any prompt runs; EngineFailed.
        """
        listed = _as_list(prompts)
        params = _params_of(sampling_params, len(listed))
        asked = (_generate_params(p, s) for p, s in zip(listed, params, strict=True))
        return self._run([(text, given, None) for text, given in asked], use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The best continuations of each prompt; prompts and errors as in `generate`."""
        outputs = self.generate(prompts, params.as_sampling(), use_tqdm=use_tqdm)
        return [beams_of(output, params, self._decode) for output in outputs]

    def _decode(self, tokens: Sequence[int]) -> str:
        tokenizer = self._calls.model.tokenizer
        if isinstance(tokenizer, NoTokenizer):
            return ""
        return self._thread.run(tokenizer.decode(tokens))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Like `generate`, for one chat or several, rendered with the model's chat template.

        `tools` are shown to the model; its tool calls are in the text, unparsed.
        `add_generation_prompt` (default: true) begins an assistant message after the others;
        `continue_final_message` continues the text of the last message instead.
        """
        self._check_open()
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        chats: Sequence[Any] = [messages] if is_one else messages
        if not all(_is_chat(chat) for chat in chats):
            message = "a chat is a list of messages, each a mapping: role and content"
            raise InvalidRequest(message, "messages")
        params = _params_of(sampling_params, len(chats))
        template = self._template
        if template is None:
            message = "this model has no chat template: use generate"
            raise InvalidRequest(message, "messages", "unsupported_parameter")
        shown = shown_tools(TOOLS.read(list(tools), "tools")) if tools else ()

        async def render(chat: Any) -> ChatPrompt:
            found = {
                "messages": MESSAGES.read([dict(one) for one in chat], "messages"),
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
            }
            return await template.render(found["messages"], shown, ending=ending_of(found))

        rendered = [self._thread.run(render(chat)) for chat in chats]
        requests: list[_Asked] = [
            (prompt.text, {"add_special_tokens": False, **one.as_params()}, prompt.special_at)
            for prompt, one in zip(rendered, params, strict=True)
        ]
        return self._run(requests, use_tqdm)

    def _run(self, requests: Sequence[_Asked], use_tqdm: bool) -> list[RequestOutput]:
        self._check_open()
        bar = tqdm(
            total=len(requests), desc="Processed prompts", dynamic_ncols=True, disable=not use_tqdm
        )
        with bar:
            return self._thread.run(_run_all(self._calls, requests, bar))

    def _check_open(self) -> None:
        if not self._close.alive:
            raise BatonError("this LLM is closed")


async def _load(thread: LoopThread, config: EngineConfig, front: GatewayConfig) -> LocalCalls:
    calls = None
    try:
        with thread.long_step():
            calls = LocalCalls.load(config, front, log.info)
        await asyncio.sleep(0)  # raises if the caller was interrupted
    except asyncio.CancelledError:
        if calls is not None:
            calls.close()
        raise
    calls.begin()
    return calls


async def _run_all(calls: LocalCalls, requests: Sequence[_Asked], bar: Any) -> list[RequestOutput]:
    prepared = []
    for index, (text, params, spans) in enumerate(requests):
        try:
            wire, _ = build_request(text, params)
            prepared.append((text, await calls.prepare(wire, spans)))
        except BatonError as error:
            error.add_note(f"prompt {index} of {len(requests)}")
            raise

    async def run(text: str | None, request: ValidatedRequest) -> RequestOutput:
        with calls.running(request) as call:
            samples = [chunk async for chunk in call.chunks()]
        bar.update()
        token_of = calls.model.tokenizer.token
        return request_output(call.record.call_id, text, request, samples, token_of)

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(*one)) for one in prepared]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a sequence of token ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray):
        return [prompts]  # refused later
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def _is_chat(chat: Any) -> bool:
    is_list = isinstance(chat, Sequence) and not isinstance(chat, str)
    return is_list and all(isinstance(one, Mapping) for one in chat)


def _params_of(params: Params, num_prompts: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if isinstance(params, Mapping) or not all(isinstance(one, SamplingParams) for one in params):
        message = "sampling_params are SamplingParams, one or one for each prompt"
        raise InvalidRequest(message, "sampling_params")
    if len(params) != num_prompts:
        message = f"{len(params)} sampling_params for {num_prompts} prompts: give one or one each"
        raise InvalidRequest(message, "sampling_params")
    return params


def _generate_params(prompt: Prompt, sampling: SamplingParams) -> tuple[str | None, GenerateParams]:
    params = sampling.as_params()
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - {"prompt", "prompt_token_ids"}:
            raise InvalidRequest(f"a prompt cannot have {', '.join(sorted(unknown))}", "prompt")
        if "prompt_token_ids" in prompt:
            params["prompt_token_ids"] = prompt["prompt_token_ids"]
        return prompt.get("prompt"), params
    if isinstance(prompt, str):
        return prompt, params
    params["prompt_token_ids"] = prompt
    return None, params
