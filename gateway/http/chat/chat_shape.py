"""What /v1/chat/completions writes for a sample: deltas of a stream, or a whole message."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...request.output_chunk import OutputChunk, RequestResult
from ..generate.logprobs import TokenOf, chat_logprobs
from ..protocol.text_event import TextEvent
from .tool_parsing import Content, Delta, ToolCallParser, ToolDelta


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What was asked for beside the message. `max_tool_calls`: None for any number."""

    logprobs: bool = False
    return_token_ids: bool = False
    max_tool_calls: int | None = None


@dataclass(slots=True)
class _Call:
    name: str
    arguments: list[str] = field(default_factory=list)


class ChatChoice:
    """One sample. `parser` None: all text is content; `opening` is text that the prompt forced."""

    def __init__(
        self,
        index: int,
        options: ChatOptions,
        token_of: TokenOf,
        new_id: Callable[[], str],
        parser: ToolCallParser | None = None,
        opening: str = "",
    ) -> None:
        self._index = index
        self._options = options
        self._token_of = token_of
        self._new_id = new_id
        self._parser = parser
        self._opening = opening
        self._is_first = True
        self._num_calls = 0
        self.text_event: TextEvent | None = None
        if parser is None and not (options.logprobs or options.return_token_ids):
            self.text_event = TextEvent(
                f'{{"index":{index},"delta":{{"content":', '},"logprobs":null,"finish_reason":null}'
            )

    # --- in a stream ------------------------------------------------------------------------------

    def events(self, chunk: OutputChunk) -> list[str]:
        """JSON of what a stream shows of this chunk; the role comes first of all."""
        events = []
        if self._is_first:
            self._is_first = False
            events.append(json.dumps(self._event({"role": "assistant", "content": ""})))
        if self.text_event is not None and chunk.result is None:
            return [*events, self.text_event.of(chunk.text)] if chunk.text else events
        deltas = [self._delta_body(delta) for delta in self._deltas(chunk)]
        has_more = chunk.result is not None or bool(self._more(chunk))
        if has_more and not deltas:
            deltas.append({})
        bodies = [self._event(delta) for delta in deltas]
        if bodies:
            bodies[0] |= self._more(chunk)
            bodies[-1] |= self._ending(chunk.result)
        return events + [json.dumps(body) for body in bodies]

    def _event(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta_body(self, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, Content):
            return {"content": delta.text}
        call: dict[str, Any] = {
            "index": delta.index,
            "function": {"arguments": delta.arguments},
        }
        if delta.name is not None:
            call = {"index": delta.index, "id": self._call_id(), "type": "function"}
            call["function"] = {"name": delta.name, "arguments": delta.arguments}
        return {"tool_calls": [call]}

    # --- whole ------------------------------------------------------------------------------------

    def body(self, chunk: OutputChunk) -> dict[str, Any]:
        """The choice of a whole answer, of all its chunks as one."""
        content: list[str] = []
        calls: list[_Call] = []
        for delta in self._deltas(chunk):
            if isinstance(delta, Content):
                content.append(delta.text)
            elif delta.name is not None:
                calls.append(_Call(delta.name, [delta.arguments]))
            else:
                calls[-1].arguments.append(delta.arguments)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [self._call_body(call) for call in calls]
        return {
            "index": self._index,
            "message": message,
            "logprobs": None,
            **self._more(chunk),
            **self._ending(chunk.result),
        }

    def _call_body(self, call: _Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": "".join(call.arguments)}
        return {"id": self._call_id(), "type": "function", "function": function}

    # --- both -------------------------------------------------------------------------------------

    def _deltas(self, chunk: OutputChunk) -> Sequence[Delta]:
        if self._parser is None:
            return [Content(chunk.text)] if chunk.text else []
        opening, self._opening = self._opening, ""
        deltas = self._parser.feed(opening + chunk.text)
        if chunk.result is not None:
            deltas += self._parser.finish()
        most = self._options.max_tool_calls
        kept = [d for d in deltas if isinstance(d, Content) or most is None or d.index < most]
        self._num_calls += sum(isinstance(d, ToolDelta) and d.name is not None for d in kept)
        return kept

    def _more(self, chunk: OutputChunk) -> dict[str, Any]:
        """What goes beside the text."""
        more: dict[str, Any] = {}
        if self._options.logprobs and chunk.token_ids:
            more["logprobs"] = chat_logprobs(chunk.token_ids, chunk.logprobs, self._token_of)
        if self._options.return_token_ids and chunk.token_ids:
            more["token_ids"] = list(chunk.token_ids)
        return more

    def _ending(self, result: RequestResult | None) -> dict[str, Any]:
        if result is None:
            return {}
        reason = result.finish_reason.value
        if self._num_calls and reason == "stop":
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": result.matched_stop}

    def _call_id(self) -> str:
        return f"call_{self._new_id()[:24]}"
