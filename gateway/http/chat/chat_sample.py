"""One sample of a chat: splits its text into reasoning, content and calls, streamed or whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....core.request.request import FinishReason, TokenLogprobs
from ...request.output_chunk import OutputChunk, RequestResult
from ..generate.generated_answer import Sample, TokenOf
from ..protocol.answers import (
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Function,
    TokenLogprob,
    ToolCall,
    TopLogprobs,
    json_text,
)
from ..protocol.event_stream import TextEventTemplate
from .reasoning import ReasoningParser
from .tool_call_parsers import DeltaKind, ParsedDelta, ToolCallParser


class ChatSample(Sample):
    """One sample. `parser` None: all text is content; `opening`: the part of it in the prompt.

    `reasoning` None: the model does not reason.
    """

    def __init__(
        self,
        index: int,
        found: Mapping[str, Any],
        token_of: TokenOf,
        new_id: Callable[[], str],
        parser: ToolCallParser | None = None,
        opening: str = "",
        reasoning: ReasoningParser | None = None,
    ) -> None:
        super().__init__(index, found, token_of)
        self._has_logprobs: bool = found.get("logprobs", False)
        self._max_calls = math.inf if found.get("parallel_tool_calls", True) else 1
        self.new_id = new_id
        self._parser = parser
        self._opening = opening
        self._num_calls = 0
        self._reasoning = reasoning
        self._is_reasoning = True  # whether the next token to count is reasoning
        self._num_read = 0
        self._tail = ""
        if reasoning is not None:
            self.num_reasoning_tokens = 0
        if parser is None and reasoning is None and not (self._has_logprobs or self._returns_ids):
            self.text_event = TextEventTemplate(
                f'{{"index":{index},"delta":{{"content":', '},"logprobs":null,"finish_reason":null}'
            )

    # --- in a stream ------------------------------------------------------------------------------

    def events(self, chunk: OutputChunk) -> list[str]:
        """The chunk's deltas as JSON; the first delta of all has the role."""
        events = []
        if self._is_first:
            self._is_first = False
            role = ChatMessage(role="assistant", content="")
            events.append(json_text(ChatDelta(index=self._index, delta=role)))
        if self.text_event is not None and chunk.result is None:
            return [*events, self.text_event.of(chunk.text)] if chunk.text else events
        deltas = [self._delta(delta) for delta in self.deltas(chunk)]
        has_more = bool(chunk.token_ids) and (self._has_logprobs or self._returns_ids)
        if not deltas and (has_more or chunk.result is not None):
            deltas.append(ChatMessage())
        choices = [ChatDelta(index=self._index, delta=delta) for delta in deltas]
        if choices:
            self._add_tokens(choices[0], chunk)
            self._add_ending(choices[-1], chunk.result)
        return events + [json_text(choice) for choice in choices]

    def _delta(self, delta: ParsedDelta) -> ChatMessage:
        if delta.kind is DeltaKind.TEXT:
            return ChatMessage(content=delta.text)
        if delta.kind is DeltaKind.REASONING:
            return ChatMessage(reasoning_content=delta.text)
        call = ToolCall(Function(delta.text), delta.call)
        if delta.name is not None:
            call = self._new_call(delta.name, delta.text)
            call.index = delta.call
        return ChatMessage(tool_calls=[call])

    # --- whole ------------------------------------------------------------------------------------

    def choice(self, chunk: OutputChunk) -> ChatChoice:
        """The choice of a whole answer; `chunk`: all its chunks merged."""
        texts = {DeltaKind.TEXT: "", DeltaKind.REASONING: ""}
        calls: list[ToolCall] = []
        for delta in self.deltas(chunk):
            if delta.kind is not DeltaKind.CALL:
                texts[delta.kind] += delta.text
            elif delta.name is not None:
                calls.append(self._new_call(delta.name, delta.text))
            else:
                calls[-1].function.arguments += delta.text
        content, reasoning = texts.values()
        message = ChatMessage("assistant", content)
        if calls or reasoning:
            message.content = content or None
        if reasoning:
            message.reasoning_content = reasoning
        if calls:
            message.tool_calls = calls
        choice = ChatChoice(index=self._index, message=message)
        self._add_tokens(choice, chunk)
        self._add_ending(choice, chunk.result)
        return choice

    # --- both -------------------------------------------------------------------------------------

    def deltas(self, chunk: OutputChunk) -> Sequence[ParsedDelta]:
        """The deltas of `chunk`, which is the next chunk."""
        opening, self._opening = self._opening, ""
        reasoning, text = self._split_reasoning(chunk)
        before = [ParsedDelta(DeltaKind.REASONING, reasoning)] if reasoning else []
        if self._parser is None:
            return [*before, ParsedDelta(DeltaKind.TEXT, text)] if text else before
        deltas = self._parser.feed(opening + text)
        if chunk.result is not None:
            deltas += self._parser.finish()
        kept = [d for d in deltas if d.call < self._max_calls]
        self._num_calls += sum(d.name is not None for d in kept)
        return [*before, *kept]

    def is_cut(self, result: RequestResult) -> bool:
        """Whether the output is incomplete: it ended at its limit, or within a call."""
        open_call = None if self._parser is None else self._parser.open_call
        is_in_call = open_call is not None and open_call < self._max_calls
        return is_in_call or result.finish_reason is not FinishReason.STOP

    def _split_reasoning(self, chunk: OutputChunk) -> tuple[str, str]:
        """The chunk's text as reasoning and other text."""
        parser = self._reasoning
        if parser is None or parser.is_over:
            return "", chunk.text
        reasoning, text = parser.feed(chunk.text)
        self._count_reasoning(parser, chunk.token_ids)
        if chunk.result is not None:
            last, rest = parser.finish()
            reasoning, text = reasoning + last, text + rest
        return reasoning, text

    def _count_reasoning(self, parser: ReasoningParser, token_ids: Sequence[int]) -> None:
        """Count the tokens up to the end tag, which may be several tokens."""
        for token_id in token_ids:
            if not self._is_reasoning:
                break
            self._num_read += 1
            self._tail = (self._tail + self._token_of(token_id).text)[-2 * len(parser.end) :]
            self._is_reasoning = parser.end not in self._tail
        if parser.has_reasoned:
            self.num_reasoning_tokens = self._num_read

    def _add_tokens(self, choice: ChatDelta | ChatChoice, chunk: OutputChunk) -> None:
        """Add the tokens' log-probabilities and ids, if requested."""
        if self._has_logprobs and chunk.token_ids:
            choice.logprobs = chat_logprobs(chunk.token_ids, chunk.logprobs, self._token_of)
        if self._returns_ids and chunk.token_ids:
            choice.token_ids = chunk.token_ids

    def _add_ending(self, choice: ChatDelta | ChatChoice, result: RequestResult | None) -> None:
        if result is not None:
            is_call = self._num_calls and not self.is_cut(result)
            choice.finish_reason = "tool_calls" if is_call else result.finish_reason.value
            choice.stop_reason = result.matched_stop

    def _new_call(self, name: str, arguments: str) -> ToolCall:
        call_id = f"call_{self.new_id()[:24]}"
        return ToolCall(Function(arguments, name), id=call_id, type="function")


def chat_logprobs(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs], token_of: TokenOf
) -> ChatLogprobs:
    """The log-probabilities of /v1/chat/completions: one object per token."""

    def of(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        token = token_of(token_id)
        return token.text, logprob, list(token.data)

    return ChatLogprobs(
        [
            TopLogprobs(
                *of(token_id, score.logprob), [TokenLogprob(*of(*other)) for other in score.top]
            )
            for token_id, score in zip(token_ids, scores, strict=True)
        ]
    )
