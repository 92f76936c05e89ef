"""From calls to an answer, for both endpoints that generate: a stream of events, or one object.

An endpoint gives a `ResponsePlan` (what to run, what to tell) and a `ResponseShape` (how choices
are written).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from ...admission.front_door import RunningCall
from ...request.chunk_queue import merged
from ...request.output_chunk import OutputChunk
from ..protocol.app_state import APP_STATE, caller_of
from ..protocol.error_middleware import REQUEST_ID
from ..protocol.event_stream import EventStream
from ..protocol.text_event import TextEvent
from .run_prompts import PromptsCall, Sender, run_calls
from .usage import Usage

_DONE = "data: [DONE]\n\n"
_MAX_TRACE = 512  # characters of a header, as W3C has it for tracestate


class Choice(Protocol):
    """One sample, as its endpoint writes it.

    `text_event`: what `events` gives for a chunk that only adds a text, of all chunks but the
    sample's first and last; None where more is told.
    """

    text_event: TextEvent | None

    def events(self, chunk: OutputChunk) -> list[str]:
        """JSON objects for a stream."""
        ...

    def body(self, chunk: OutputChunk) -> dict[str, Any]:
        """The object in a whole answer; `chunk` is all of the sample."""
        ...


class ResponseShape(Protocol):
    """An endpoint's way of writing."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    async def begin(self, generations: Sequence[RunningCall]) -> Sequence[Choice]:
        """The choices: for each prompt its samples. Before any chunk."""
        ...

    def first_chunk(self, prompt_index: int, chunk: OutputChunk) -> None:
        """The first chunk of a prompt's first sample, which has the prompt's scores."""
        ...

    def extra(self) -> dict[str, Any]:
        """What else stands in a whole answer."""
        ...


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """What to run and what to tell of it."""

    calls: Sequence[PromptsCall]
    num_samples: int
    is_stream: bool
    includes_usage: bool = False
    has_continuous_usage: bool = False


async def answer(
    request: web.Request, plan: ResponsePlan, shape: ResponseShape
) -> web.StreamResponse:
    """Run the plan's calls; raises what ended them."""
    run = _Run(request, plan, shape)
    sender = Sender(
        caller_of(request), _trace(request, "traceparent"), _trace(request, "tracestate")
    )
    on_chunk, push = (run.send, run.push) if plan.is_stream else (run.collect, None)
    await run_calls(request.app[APP_STATE].door, plan.calls, sender, run.begin, on_chunk, push)
    return await run.end_stream() if plan.is_stream else run.whole()


def _trace(request: web.Request, header: str) -> str:
    text = request.headers.get(header, "")
    return text if len(text) <= _MAX_TRACE else ""


class _Run:
    """One answer while it comes about."""

    def __init__(self, request: web.Request, plan: ResponsePlan, shape: ResponseShape) -> None:
        self._request = request
        self._plan = plan
        self._shape = shape
        self._usage = Usage()
        self._choices: Sequence[Choice] = ()
        self._text_events: Sequence[TextEvent | None] = ()  # one a choice, whole
        self._chunks: dict[int, list[OutputChunk]] = {}
        self._nodes: dict[str, str] = {}
        self._envelope: dict[str, Any] = {}
        self._stream = EventStream(request)
        self._head = ""
        self._tail = "]}\n\n"

    async def begin(self, generations: Sequence[RunningCall]) -> None:
        """All calls were accepted."""
        first = generations[0]
        self._request.setdefault(REQUEST_ID, first.call_id)
        self._usage.prompt_tokens = sum(g.record.prompt_tokens for g in generations)
        self._choices = await self._shape.begin(generations)
        shape = self._shape
        self._envelope = {
            "id": shape.id_prefix + first.call_id,
            "object": shape.chunk_object if self._plan.is_stream else shape.whole_object,
            "created": first.record.arrived_unix_ns // 1_000_000_000,
            "model": first.record.model,
        }
        head = json.dumps(self._envelope, separators=(",", ":"))[:-1]
        self._head = f'data: {head},"choices":['
        if self._plan.includes_usage:
            self._tail = '],"usage":null}\n\n'
        self._text_events = [self._whole(choice.text_event) for choice in self._choices]

    def _whole(self, event: TextEvent | None) -> TextEvent | None:
        if event is None or self._plan.has_continuous_usage:
            return None
        return event.within(self._head, self._tail)

    def _note(self, prompt_index: int, chunk: OutputChunk) -> int:
        """Count a chunk; returns whose it is."""
        self._usage.add(prompt_index, chunk)
        if chunk.sample_index == 0 and chunk.index == 0:
            self._shape.first_chunk(prompt_index, chunk)
        if chunk.result is not None and not self._nodes:
            result = chunk.result
            self._nodes = {"prefill_node": result.prefill_node}
            self._nodes["decode_node"] = result.decode_node or ""
        return prompt_index * self._plan.num_samples + chunk.sample_index

    # --- a stream ---------------------------------------------------------------------------------

    async def send(self, prompt_index: int, chunk: OutputChunk) -> None:
        if events := self._events(prompt_index, chunk):
            await self._stream.send(events)

    def push(self, chunk: OutputChunk) -> bool:
        """Write the only prompt's next chunk now, if the client takes what is written."""
        if not self._stream.has_room:
            return False
        event = self._text_events[chunk.sample_index]
        if event is not None and chunk.index and chunk.text:  # nearly always
            self._usage.completion_tokens += len(chunk.token_ids)
            self._stream.send_now(event.of(chunk.text))
        elif events := self._events(0, chunk):
            self._stream.send_now(events)
        return True

    def _events(self, prompt_index: int, chunk: OutputChunk) -> str:
        """What the stream shows of a chunk; empty while its text is held back."""
        choice = self._choices[self._note(prompt_index, chunk)]
        events = choice.events(chunk)
        tail = self._tail
        if self._plan.has_continuous_usage:
            tail = f'],"usage":{self._usage.text()}}}\n\n'
        if len(events) == 1:
            return f"{self._head}{events[0]}{tail}"
        return "".join([f"{self._head}{event}{tail}" for event in events])

    async def end_stream(self) -> web.StreamResponse:
        last = _DONE
        if self._plan.includes_usage:
            body = self._envelope | {"choices": [], "usage": self._usage.body()} | self._nodes
            last = f"data: {json.dumps(body)}\n\n{_DONE}"
        await self._stream.send(last)
        return await self._stream.end()

    # --- whole ------------------------------------------------------------------------------------

    async def collect(self, prompt_index: int, chunk: OutputChunk) -> None:
        self._chunks.setdefault(self._note(prompt_index, chunk), []).append(chunk)

    def whole(self) -> web.Response:
        choices = [
            choice.body(merged(self._chunks[index])) for index, choice in enumerate(self._choices)
        ]
        usage = {"usage": self._usage.body()}
        body = self._envelope | {"choices": choices} | usage | self._shape.extra()
        return web.json_response(body, headers=self._headers())

    def _headers(self) -> Mapping[str, str]:
        nodes = {f"x-{key.replace('_', '-')}": _ascii(name) for key, name in self._nodes.items()}
        return nodes | {"x-cached-tokens": str(self._usage.num_cached)}


def _ascii(name: str) -> str:
    """A node's name as a header can carry it."""
    return "".join(char if " " <= char <= "~" else "?" for char in name)
