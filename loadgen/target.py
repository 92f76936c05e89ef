"""The server that is measured: whether it answers, what it serves, which fields it takes.

One request is sent before any is counted; what is wrong with the target is found there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from ..core.errors import StartupFailed
from .driver import DriverError, TokenUsage
from .generator import PlannedRequest
from .openai_driver import CHAT, COMPLETIONS, HttpError, OpenAiDriver, Unreachable, session

# One after the other, for servers that refuse what is not OpenAI's.
_OTHER_FIELDS: tuple[Mapping[str, Any], ...] = (
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": None},
)
_REFUSED = (400, 422)
_PATHS = {"completions": COMPLETIONS, "chat": CHAT}


@dataclass(frozen=True, slots=True)
class Target:
    """`base_url` with or without /v1; `model` None: the one that it serves."""

    base_url: str
    endpoint: str
    model: str | None = None
    api_key: str | None = None
    fields: Mapping[str, Any] | None = None

    @property
    def root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Reached:
    """A target that has answered. `usage` None: it does not count tokens."""

    driver: OpenAiDriver
    model: str
    usage: TokenUsage | None


@asynccontextmanager
async def reached(target: Target, first: PlannedRequest) -> AsyncIterator[Reached]:
    """Send `first`, with the fields that the server takes. Raises StartupFailed."""
    if not target.base_url.startswith(("http://", "https://")):
        raise StartupFailed(
            f"--base-url {target.base_url!r} does not begin with http:// or https://",
            hint="--base-url http://localhost:8000",
        )
    async with session(target.api_key) as http:
        model = target.model or await _only_model(http, target)
        for number, more in enumerate(_OTHER_FIELDS):
            fields = {**(target.fields or {}), **more}
            path = _PATHS[target.endpoint]
            driver = OpenAiDriver(http, [target.root], model, fields, path)
            try:
                usage = await _first_answer(driver, first)
            except HttpError as error:
                is_last = number == len(_OTHER_FIELDS) - 1
                if error.status in _REFUSED and "stream_options" in error.message and not is_last:
                    continue
                raise _failure(target, model, error) from error
            except DriverError as error:
                raise _failure(target, model, error) from error
            yield Reached(driver, model, usage)
            return


async def _first_answer(driver: OpenAiDriver, first: PlannedRequest) -> TokenUsage | None:
    usage, num_tokens = None, 0
    async with aclosing(driver.stream(first.content, first.num_output_tokens)) as counts:
        async for count in counts:
            if isinstance(count, TokenUsage):
                usage = count
            else:
                num_tokens += count
    if not num_tokens:
        raise DriverError("the first answer had no tokens")
    return usage


async def _only_model(http: aiohttp.ClientSession, target: Target) -> str:
    try:
        async with http.get(f"{target.root}/v1/models") as response:
            if response.status != 200:
                raise HttpError(response.status, (await response.text(errors="replace"))[:200])
            found = await response.json(content_type=None)
            names = [str(model["id"]) for model in found["data"]]
    except aiohttp.ClientConnectorError as error:
        raise _failure(target, "", Unreachable(str(error.strerror or error))) from error
    except HttpError as error:
        raise _failure(target, "", error) from error
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise StartupFailed(
            f"{target.root}/v1/models has no list of models: {type(error).__name__}: {error}",
            hint="--model NAME",
        ) from error
    if len(names) != 1:
        raise StartupFailed(
            f"the target serves {len(names)} models: {', '.join(names[:10])}", hint="--model NAME"
        )
    return names[0]


def _failure(target: Target, model: str, error: DriverError) -> StartupFailed:
    """What is wrong with the target, and what to do."""
    if isinstance(error, Unreachable):
        hint = "check --base-url; is it running?"
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            hint = "SSL_CERT_FILE=ca.crt names the CA of its certificate"
        return StartupFailed(f"{target.root} cannot be reached: {error}", hint=hint)
    if not isinstance(error, HttpError):
        return StartupFailed(f"the first request to {target.root} failed: {error}")
    match error.status:
        case 401 | 403:
            hint = "its key in BATON_API_KEY"
            if target.api_key:
                hint = "the key in BATON_API_KEY is not one of this target, or may not do this"
        case 404:
            hint = f"--model, --base-url: has it {_PATHS[target.endpoint]} and {model!r}?"
        case 400 | 422:
            hint = "--endpoint, --input-len, --output-len, --no-ignore-eos, --extra-body"
        case 200:
            hint = "--base-url of a server of OpenAI's API"
        case _:
            hint = ""
    return StartupFailed(f"{target.root} answered {error}", hint=hint)
