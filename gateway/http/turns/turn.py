"""One answer of a chat as a sequence of blocks, for the Responses API and Anthropic's messages.

    deltas   REASONING "why"  TEXT "so "  TEXT "it is"  CALL now {"zone": "UTC"}
    blocks   [ reasoning    ][ text                        ][ call                         ]
A block begins with its first delta, and ends when a delta of another block comes or the answer
ends. The endpoint defines what is written for a block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from ...admission.running_call import RunningCall
from ...request.output_chunk import OutputChunk, RequestResult, merged
from ..chat.chat import Chat
from ..chat.chat_sample import ChatSample
from ..chat.tool_call_parsers import DeltaKind, ParsedDelta
from ..generate.generated_answer import Sample
from ..protocol.answers import answer, json_text
from ..protocol.errors import NUM_EVENTS


@dataclass(slots=True)
class Block:
    """`id`: 32 hex digits; `name`: of the function, if the block is a call."""

    kind: DeltaKind
    index: int
    id: str
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The block's text so far; for a call, the arguments' JSON."""
        return "".join(self.pieces)


class Turn(Chat):
    """One answer with one sample. A subclass defines a stream's events and the whole answer."""

    @abstractmethod
    def begun(self) -> Sequence[Struct]:
        """The events before any block. An event is a struct with a `type`."""

    @abstractmethod
    def block_begun(self, block: Block) -> Sequence[Struct]:
        """The events before a block's first text."""

    @abstractmethod
    def block_grew(self, block: Block, text: str) -> Sequence[Struct]:
        """The events for more text of the last block."""

    @abstractmethod
    def block_ended(self, block: Block, *, is_cut: bool) -> Sequence[Struct]:
        """The events at a block's end; `is_cut`: the block is incomplete."""

    @abstractmethod
    def ended(self, result: RequestResult) -> Sequence[Struct]:
        """The events after all blocks."""

    @abstractmethod
    def body(self, result: RequestResult) -> Struct:
        """The whole answer."""

    async def samples(self, calls: Sequence[RunningCall]) -> Sequence[Sample]:
        self.blocks: list[Block] = []
        self._is_open = False
        self.sample: ChatSample = self.new_sample(0)
        self.sample.text_event = None
        return [self.sample]

    def _events(self, prompt_index: int, chunk: OutputChunk) -> str:
        is_first = not self._request.get(NUM_EVENTS)
        self._note(prompt_index, chunk)
        events = list(self.begun()) if is_first else []
        for delta in self.sample.deltas(chunk):
            events += self._grow(delta)
        if chunk.result is not None:
            is_cut = self.sample.is_cut(chunk.result)
            events += [*self._end_block(is_cut=is_cut), *self.ended(chunk.result)]
        return "".join(map(self._written, events))

    def _written(self, event: Struct) -> str:
        number = self._request.get(NUM_EVENTS, 0)
        self._request[NUM_EVENTS] = number + 1
        if hasattr(event, "sequence_number"):
            event.sequence_number = number
        text = json_text(event)
        return f"event: {event.type}\ndata: {text}\n\n"  # type: ignore[attr-defined]

    def _grow(self, delta: ParsedDelta) -> list[Struct]:
        events: list[Struct] = []
        kind, name = delta.kind, delta.name
        if name is not None or not self._is_open or self.blocks[-1].kind is not kind:
            events += self._end_block()
            self.blocks.append(Block(kind, len(self.blocks), self.sample.new_id(), name or ""))
            self._is_open = True
            events += self.block_begun(self.blocks[-1])
        if delta.text:
            self.blocks[-1].pieces.append(delta.text)
            events += self.block_grew(self.blocks[-1], delta.text)
        return events

    def _end_block(self, *, is_cut: bool = False) -> Sequence[Struct]:
        if not self._is_open:
            return ()
        self._is_open = False
        return self.block_ended(self.blocks[-1], is_cut=is_cut)

    async def _end_stream(self) -> web.StreamResponse:
        return await self._stream.end()

    def _whole(self) -> web.Response:
        chunks = self._chunks[0]
        for delta in self.sample.deltas(merged(chunks)):
            self._grow(delta)
        (result,) = (chunk.result for chunk in chunks if chunk.result is not None)
        return answer(self.body(result), headers=self.node_headers())


def call_arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object; empty if the model's text is no JSON object."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
