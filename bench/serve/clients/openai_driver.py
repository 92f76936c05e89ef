"""Any server of OpenAI's `/v1/completions`, streamed as server-sent events, prompts as token ids.

Counts tokens by `usage.completion_tokens` where the server tells it in every chunk
(`continuous_usage_stats`), else one for each chunk with text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from .driver import Driver, DriverError

_DATA, _DONE = b"data:", b"[DONE]"


class OpenAiDriver:
    """One session of connections, one connection a request in flight; servers in turn."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        base_urls: Sequence[str],
        model: str,
        fields: Mapping[str, Any],
    ) -> None:
        self._http = http
        self._urls = itertools.cycle([f"{url.rstrip('/')}/v1/completions" for url in base_urls])
        self._model = model
        self._fields = fields

    async def stream(self, prompt_ids: Sequence[int], num_tokens: int) -> AsyncIterator[int]:
        body = {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **self._fields,
        }
        num_seen = 0
        try:
            async with self._http.post(next(self._urls), json=body) as response:
                if response.status != 200:
                    text = (await response.text())[:200]
                    raise DriverError(f"HTTP {response.status}: {text}")
                async for event in _events(response):
                    num_now = _tokens_so_far(event, num_seen)
                    if num_now > num_seen:
                        yield num_now - num_seen
                        num_seen = num_now
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise DriverError(f"{type(error).__name__}: {error}") from error


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of the stream, up to its end mark."""
    async for line in response.content:
        if not line.startswith(_DATA):
            continue
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            return
        yield json.loads(data)


def _tokens_so_far(event: dict[str, Any], num_seen: int) -> int:
    if "error" in event:
        raise DriverError(str(event["error"])[:200])
    usage = event.get("usage")
    if usage:
        return int(usage["completion_tokens"])
    return num_seen + any(choice.get("text") for choice in event.get("choices", ()))


@asynccontextmanager
async def connect_openai(
    base_urls: Sequence[str], model: str, first: int = 0, fields: Mapping[str, Any] | None = None
) -> AsyncIterator[Driver]:
    """A driver without limits of its own on connections, time or the length of a line.

    Requests go to the servers in turn, from number `first` on; `fields`: more of their bodies.
    """
    first %= len(base_urls)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=1 << 20,
    ) as http:
        yield OpenAiDriver(http, [*base_urls[first:], *base_urls[:first]], model, fields or {})
