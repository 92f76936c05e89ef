"""Turns the calls of one HTTP request into its answer: a stream of events, or one object.

    prompt 0 ── generate ─┐ all accepted? ─► chunks ─┐
    prompt 1 ── generate ─┤   (else none)   chunks ──┼─► _take(prompt, chunk), one at a time
    prompt 2 ── generate ─┘                 chunks ─┘
The first failure ends all calls.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

from ....core.errors import BatonError, InvalidRequest
from ....core.request.request import TokenLogprobs
from ....core.request.text_parameters import LABEL
from ....proto.v1 import inference_pb2
from ...admission.running_call import RunningCall
from ...request.output_chunk import OutputChunk, merged
from ...text.special_tokens import Spans
from ...text.token_text import TokenText
from ..protocol.answers import (
    AnswerFields,
    ChoiceFields,
    CompletionDetails,
    PromptDetails,
    PromptLogprob,
    PromptLogprobs,
    Usage,
    answer,
    json_text,
)
from ..protocol.app_state import APP_STATE, AT_DOOR, CALLER
from ..protocol.errors import REQUEST_ID, REQUEST_ID_HEADER
from ..protocol.event_stream import EventStream, TextEventTemplate

_DONE = "data: [DONE]\n\n"
_TAIL = "]}\n\n"  # after the choices of an event
_MAX_TRACE = 512  # characters of a header, W3C's limit for tracestate

TokenOf = Callable[[int], TokenText]


class Sample(ABC):
    """One sample in the format of its endpoint; `index` counts samples over all prompts.

    `text_event`: what `events` returns for a chunk that only adds a text and is neither the
    sample's first nor its last; None if chunks contain more than text.
    """

    text_event: TextEventTemplate | None = None
    num_reasoning_tokens: int | None = None  # so far; None: the model does not reason

    def __init__(self, index: int, found: Mapping[str, Any], token_of: TokenOf) -> None:
        """`found`: the request's fields."""
        self._index = index
        self._returns_ids: bool = found.get("return_token_ids", False)
        self._token_of = token_of
        self._is_first = True

    @abstractmethod
    def events(self, chunk: OutputChunk) -> list[str]:
        """The JSON objects that a stream sends for this chunk."""

    @abstractmethod
    def choice(self, chunk: OutputChunk) -> ChoiceFields:
        """The object in a whole answer; `chunk`: the whole sample."""


class GeneratedAnswer(ABC):
    """One answer while it is generated; each endpoint has its own format.

    `prompts`: the requests to run concurrently. `names`: the client's names of fields, by ours.
    `extra`: further fields of a whole answer.
    """

    id_prefix: str
    answer_type: type[AnswerFields]
    chunk_type: type[AnswerFields]
    special_at: Spans | None = None  # see FrontDoor.generate
    prompts: Sequence[inference_pb2.GenerateRequest]
    names: Mapping[str, str]

    def __init__(self, request: web.Request, found: Mapping[str, Any]) -> None:
        """Raises InvalidRequest for an invalid request id, and stream options without a stream."""
        self.app = request.app
        self.label = request.headers.get(REQUEST_ID_HEADER, "")
        if self.label:
            LABEL.check(self.label, REQUEST_ID_HEADER, 0)
        self.num_samples: int = found.get("n", 1)
        self.is_stream: bool = found.get("stream", False)
        if "stream_options" in found and not self.is_stream:
            message = "stream_options needs stream: true"
            raise InvalidRequest(message, "stream_options", "invalid_value")
        if "prompt_logprobs" in found and self.is_stream:
            message = "prompt_logprobs are not returned in streams"
            raise InvalidRequest(message, "prompt_logprobs", "unsupported_parameter")
        options = found.get("stream_options", {})
        self._includes_usage = options.get("include_usage", False)
        self._has_continuous_usage = self._includes_usage and options.get("continuous_usage_stats")
        self._request = request
        self.extra: dict[str, Any] = {}
        self._num_prompt_tokens = self._num_output_tokens = 0  # of all prompts and samples
        self._num_cached: dict[int, int] = {}  # by prompt, from the first end of its samples on
        self._samples: Sequence[Sample] = ()
        self._text_events: Sequence[TextEventTemplate | None] = ()  # per sample, as whole events
        self._chunks: dict[int, list[OutputChunk]] = {}
        self._nodes: dict[str, str] = {}
        self._envelope: dict[str, Any] = {}
        self._stream = EventStream(request)
        self._head = ""

    @abstractmethod
    async def samples(self, calls: Sequence[RunningCall]) -> Sequence[Sample]:
        """The samples of all prompts, prompt by prompt. Called before any chunk."""

    @abstractmethod
    def first_chunk(self, prompt_index: int, chunk: OutputChunk) -> None:
        """Take the first chunk of a prompt's first sample, which has the prompt's scores."""

    def names_of(self, prompt_index: int) -> Mapping[str, str]:
        """`names` for errors about this prompt."""
        return self.names

    async def run(self) -> web.StreamResponse:
        """Run the prompts; raises the error that ended them, with the client's names of fields."""
        if len(self.prompts) == 1:
            async with self._generate(0) as call:
                await self._begin([call])
                if self.is_stream:
                    call.push = self._push
                async for chunk in call.chunks():
                    await self._take(0, chunk)
        else:
            await self._run_several()
        return await self._end_stream() if self.is_stream else self._whole()

    async def _run_several(self) -> None:
        """Run all prompts to their ends; raises the first error."""
        started: dict[int, RunningCall] = {}
        all_accepted = asyncio.Event()
        one_at_a_time = asyncio.Lock()

        async def run(index: int) -> None:
            async with self._generate(index) as call:
                started[index] = call
                if len(started) == len(self.prompts):
                    await self._begin([started[i] for i in range(len(self.prompts))])
                    all_accepted.set()
                await all_accepted.wait()
                async for chunk in call.chunks():
                    async with one_at_a_time:
                        await self._take(index, chunk)

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(self.prompts)):
                    tasks.create_task(run(index))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    @asynccontextmanager
    async def _generate(self, prompt_index: int) -> AsyncIterator[RunningCall]:
        self._request[AT_DOOR] = True
        with renaming(self.names_of(prompt_index)):
            async with self.app[APP_STATE].door.generate(
                self.prompts[prompt_index],
                self._request[CALLER],
                traceparent=self._trace("traceparent"),
                tracestate=self._trace("tracestate"),
                special_at=self.special_at,
            ) as call:
                yield call

    def _trace(self, header: str) -> str:
        text = self._request.headers.get(header, "")
        return text if len(text) <= _MAX_TRACE else ""

    async def _begin(self, calls: Sequence[RunningCall]) -> None:
        """Prepare the answer, once all prompts are accepted."""
        first = calls[0]
        self._request.setdefault(REQUEST_ID, first.record.call_id)
        self._num_prompt_tokens = sum(call.record.prompt_tokens for call in calls)
        self._samples = await self.samples(calls)
        self._envelope = {
            "id": self.id_prefix + first.record.call_id,
            "created": first.record.arrived_unix_ns // 1_000_000_000,
            "model": first.record.model,
        }
        if not self.is_stream:
            return
        chunk = self.chunk_type(**self._envelope | {"choices": []})
        if self._includes_usage and not self._has_continuous_usage:
            chunk.usage = None
        self._head = f"data: {json_text(chunk).removesuffix(']}')}"
        self._text_events = [
            None
            if sample.text_event is None or self._has_continuous_usage
            else sample.text_event.within(self._head, _TAIL)
            for sample in self._samples
        ]

    async def _take(self, prompt_index: int, chunk: OutputChunk) -> None:
        """Write a chunk to the stream, or keep it for the whole answer."""
        if not self.is_stream:
            self._chunks.setdefault(self._note(prompt_index, chunk), []).append(chunk)
        elif events := self._events(prompt_index, chunk):
            await self._stream.send(events)

    def _note(self, prompt_index: int, chunk: OutputChunk) -> int:
        """Count a chunk; returns the index of its sample."""
        self._num_output_tokens += len(chunk.token_ids)
        if chunk.sample_index == 0 and chunk.index == 0:
            self.first_chunk(prompt_index, chunk)
        if (result := chunk.result) is not None:
            known = self._num_cached.get(prompt_index, 0)
            self._num_cached[prompt_index] = max(known, result.cached_tokens)
            nodes = {"prefill_node": result.prefill_node, "decode_node": result.decode_node or ""}
            self._nodes = self._nodes or nodes
        return prompt_index * self.num_samples + chunk.sample_index

    def _usage(self) -> Usage:
        num_prompt, num_output = self._num_prompt_tokens, self._num_output_tokens
        details = PromptDetails(sum(self._num_cached.values()))
        usage = Usage(num_prompt, num_output, num_prompt + num_output, details)
        reasoned = [n for one in self._samples if (n := one.num_reasoning_tokens) is not None]
        if reasoned:
            usage.completion_tokens_details = CompletionDetails(sum(reasoned))
        return usage

    # --- a stream ---------------------------------------------------------------------------------

    def _push(self, chunk: OutputChunk) -> bool:
        """Write the only prompt's next chunk now; False if the client does not read fast enough."""
        if not self._stream.has_room:
            return False
        event = self._text_events[chunk.sample_index]
        if event is not None and chunk.index and chunk.text:  # the usual case
            self._num_output_tokens += len(chunk.token_ids)
            self._stream.send_now(event.of(chunk.text))
        elif events := self._events(0, chunk):
            self._stream.send_now(events)
        return True

    def _events(self, prompt_index: int, chunk: OutputChunk) -> str:
        """The stream's events for a chunk; empty while its text is held back."""
        sample = self._samples[self._note(prompt_index, chunk)]
        events = sample.events(chunk)
        tail = _TAIL
        if self._has_continuous_usage:
            tail = f'],"usage":{json_text(self._usage())}}}\n\n'
        return "".join([f"{self._head}{event}{tail}" for event in events])

    async def _end_stream(self) -> web.StreamResponse:
        last = _DONE
        if self._includes_usage:
            end = {"choices": [], "usage": self._usage()} | self._nodes
            chunk = self.chunk_type(**self._envelope | end)
            last = f"data: {json_text(chunk)}\n\n{_DONE}"
        await self._stream.send(last)
        return await self._stream.end()

    # --- whole ------------------------------------------------------------------------------------

    def _whole(self) -> web.Response:
        choices = [one.choice(merged(self._chunks[i])) for i, one in enumerate(self._samples)]
        own = {"choices": choices, "usage": self._usage()} | self.extra
        body = self.answer_type(**self._envelope | own)
        return answer(body, headers=self.node_headers())

    def node_headers(self) -> dict[str, str]:
        """The headers of a whole answer: the nodes that served it, and its cached tokens."""
        nodes = {f"x-{key.replace('_', '-')}": _ascii(name) for key, name in self._nodes.items()}
        return nodes | {"x-cached-tokens": str(sum(self._num_cached.values()))}


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised in the block get the client's names of fields; `names`: these, by ours."""
    try:
        yield
    except BatonError as error:
        _rename(error, names)
        raise


def _rename(error: BatonError, names: Mapping[str, str]) -> None:
    for ours, theirs in names.items():
        if error.param is not None and re.match(rf"{re.escape(ours)}(?=\[|\Z)", error.param):
            error.message = re.sub(rf"\b{re.escape(ours)}(?!\w)", theirs, error.message)
            error.param = theirs + error.param.removeprefix(ours)
            return


def _ascii(name: str) -> str:
    """A node's name as a header can carry it."""
    return "".join(char if " " <= char <= "~" else "?" for char in name)


def prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs], token_of: TokenOf
) -> PromptLogprobs:
    """`prompt_logprobs` in vLLM's format: null for the first token."""
    found: PromptLogprobs = [None]
    for token_id, score in zip(token_ids[1:], scores, strict=True):
        ranks = {other: rank for rank, (other, _) in enumerate(score.top, 1)}
        logprobs = {token_id: score.logprob} | dict(score.top)
        found.append(
            {
                str(other): PromptLogprob(logprob, ranks.get(other), token_of(other).text)
                for other, logprob in logprobs.items()
            }
        )
    return found
