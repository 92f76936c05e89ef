"""What /v1/completions writes for a sample: the same object in a stream and in a whole answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....core.request.logprobs import TokenLogprobs
from ...request.output_chunk import OutputChunk
from ..protocol.text_event import TextEvent
from .logprobs import TokenOf, completion_logprobs, prompt_logprobs


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """What was asked for beside the text."""

    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False

    @property
    def is_plain(self) -> bool:
        """Text alone: most calls, so their chunks take a short way."""
        return self == CompletionOptions()


@dataclass(slots=True)
class EchoedPrompt:
    """A prompt that may be told back; `scores` come with its first sample's first chunk."""

    text: str
    token_ids: Sequence[int]
    scores: tuple[TokenLogprobs, ...] = ()


class CompletionChoice:
    """One sample of one prompt, chunk by chunk; `index` counts samples over all prompts."""

    def __init__(
        self, index: int, options: CompletionOptions, prompt: EchoedPrompt, token_of: TokenOf
    ) -> None:
        self._index = index
        self._options = options
        self._prompt = prompt
        self._token_of = token_of
        self._offset = 0
        self._is_first = True
        self.text_event: TextEvent | None = None
        if options.is_plain:
            self.text_event = TextEvent(
                f'{{"index":{index},"text":', ',"logprobs":null,"finish_reason":null}'
            )

    def events(self, chunk: OutputChunk) -> list[str]:
        """JSON of what a stream shows of this chunk: nothing while its text is held back."""
        if self.text_event is not None and chunk.result is None:
            return [self.text_event.of(chunk.text)] if chunk.text else []
        return [json.dumps(self.body(chunk))]

    def body(self, chunk: OutputChunk) -> dict[str, Any]:
        """The object for a chunk, which may be the only one."""
        options, result = self._options, chunk.result
        is_first, self._is_first = self._is_first, False
        told = self._prompt if is_first and options.echo else None
        body: dict[str, Any] = {
            "index": self._index,
            "text": (told.text if told else "") + chunk.text,
            "logprobs": None if options.logprobs is None else self._logprobs(chunk, told),
            "finish_reason": None if result is None else result.finish_reason.value,
            "stop_reason": None if result is None else result.matched_stop,
        }
        if options.return_token_ids:
            body["token_ids"] = list(chunk.token_ids)
            if is_first:
                body["prompt_token_ids"] = list(self._prompt.token_ids)
        if options.prompt_logprobs is not None and is_first:
            ids, scores = self._prompt.token_ids, self._prompt.scores
            body["prompt_logprobs"] = prompt_logprobs(ids, scores, self._token_of)
        return body

    def _logprobs(self, chunk: OutputChunk, told: EchoedPrompt | None) -> dict[str, Any]:
        ids: list[int] = []
        scores: list[TokenLogprobs | None] = []
        if told is not None:
            ids, scores = list(told.token_ids), [None, *told.scores]
        shape = completion_logprobs(
            [*ids, *chunk.token_ids], [*scores, *chunk.logprobs], self._token_of, self._offset
        )
        self._offset += sum(len(self._token_of(i).text) for i in (*ids, *chunk.token_ids))
        return shape
