"""Any server of OpenAI's completions or chats, streamed as server-sent events.

Counts tokens by `usage.completion_tokens` where the server sends it in every chunk
(`continuous_usage_stats`), else one for each chunk with text; a usage at the end corrects that.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from .driver import Content, DriverError, TokenUsage

_DATA, _DONE = b"data:", b"[DONE]"
_SHOWN_CHARS = 200  # of an answer, in an error
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
# What each request of a benchmark has, unless `fields` says otherwise.
_FIELDS: Mapping[str, Any] = {
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": CONTINUOUS,
}
_ODD_ANSWERS = (
    aiohttp.ClientError,
    TimeoutError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
)


class HttpError(DriverError):
    """An answer that is no stream of events; `message` is the server's own, if it has one."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


class Unreachable(DriverError):
    """No answer at all."""


class OpenAiDriver:
    """One session of connections, one connection a request in flight; servers in turn.

    `fields`: more of each request's body; one that is None is left out.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        base_urls: Sequence[str],
        model: str,
        fields: Mapping[str, Any],
        path: str = COMPLETIONS,
    ) -> None:
        self._http = http
        self._urls = itertools.cycle([url.rstrip("/") + path for url in base_urls])
        given = {"model": model, **_FIELDS, **fields}
        self._fields = {name: value for name, value in given.items() if value is not None}
        self._is_chat = path == CHAT

    async def stream(
        self, content: Content, num_tokens: int
    ) -> AsyncGenerator[int | TokenUsage, None]:
        """Raises HttpError, Unreachable, DriverError."""
        body = {**self._fields, **self._prompt(content), "max_tokens": num_tokens}
        num_seen, usage = 0, None
        try:
            async with self._http.post(next(self._urls), json=body) as response:
                await _check(response)
                async for event in _events(response):
                    num_now = _tokens_so_far(event, num_seen)
                    if num_now > num_seen:
                        yield num_now - num_seen
                        num_seen = num_now
                    usage = _usage(event)  # of the last one it is the whole request's
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(str(error.strerror or error)) from error
        except _ODD_ANSWERS as error:
            raise DriverError(f"{type(error).__name__}: {error}") from error
        if usage is not None:
            yield usage

    def _prompt(self, content: Content) -> Mapping[str, Any]:
        if not self._is_chat:
            return {"prompt": content if isinstance(content, str) else list(content)}
        if isinstance(content, str):
            content = [{"role": "user", "content": content}]
        return {"messages": list(content)}


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise HttpError(response.status, _message(await response.text(errors="replace")))
    if "event-stream" not in response.content_type:
        raise HttpError(200, f"{response.content_type} is no stream of events (text/event-stream)")


def _message(text: str) -> str:
    """What a server says is wrong, from OpenAI's form of errors or others."""
    try:
        found = json.loads(text)
        found = found.get("error", found)
        found = found.get("message", found) if isinstance(found, dict) else found
    except (ValueError, AttributeError):
        found = text
    return " ".join(str(found).split())[:_SHOWN_CHARS]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of the stream, up to its end mark."""
    async for line in response.content:
        if not line.startswith(_DATA):
            continue
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise DriverError(f"an event that is no object: {str(event)[:_SHOWN_CHARS]}")
        if "error" in event:
            raise DriverError(_message(json.dumps(event)))
        yield event


def _tokens_so_far(event: Mapping[str, Any], num_seen: int) -> int:
    usage, choices = event.get("usage"), event.get("choices") or ()
    if usage and choices:  # of this chunk; without choices it is the whole request's
        return int(usage["completion_tokens"])
    return num_seen + any(map(_has_text, choices))


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("text") or any(delta.get(name) for name in names))


def _usage(event: Mapping[str, Any]) -> TokenUsage | None:
    found = event.get("usage")
    if not found:
        return None
    counts = [found.get(name) for name in ("prompt_tokens", "completion_tokens")]
    if not all(count is None or isinstance(count, int) for count in counts):
        raise TypeError(f"a usage that does not count: {str(found)[:_SHOWN_CHARS]}")
    return TokenUsage(*counts)


def session(api_key: str | None = None) -> aiohttp.ClientSession:
    """Connections to servers, as many as there are requests; redirects keep no key."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        read_bufsize=1 << 20,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )
