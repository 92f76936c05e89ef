"""Reads a request's body as a JSON object, or raises an error that names what is wrong with it.

Stricter than json.loads: no duplicate names in an object, no NaN, infinity or -0, no lone
surrogate, no BOM, no data after the object. Reading stops at the cap, whatever the headers state,
and when all bodies that are being read or wait to be parsed take too much memory together.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from aiohttp import web

from ....core.errors import InvalidRequest, Overloaded
from .app_state import APP_STATE
from .errors import Refusal

MAX_BODY_BYTES = 4 << 20  # gRPC's cap
MAX_BODIES_BYTES = 512 << 20  # of all unparsed bodies; a small body is accepted in any case
MAX_BODY_S = 30.0
_SMALL_BYTES = 64 << 10
# Larger bodies are parsed on a thread, one at a time: two would halve the event loop's turns.
_LARGE_BYTES = 256 << 10

_T = TypeVar("_T")

_BOM = b"\xef\xbb\xbf"
_MAX_SHOWN = 64  # characters of a name in an error message
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Bodies:
    """The total size of the bodies that are not parsed yet, over all calls of a server."""

    def __init__(self) -> None:
        self._num_bytes = 0

    @contextmanager
    def one(self) -> Iterator[Callable[[int], None]]:
        """Yields a function to call with the size of each received part of one body; it raises
        Refusal, Overloaded."""
        num_bytes = 0

        def take(num_more: int) -> None:
            nonlocal num_bytes
            num_bytes += num_more
            self._num_bytes += num_more
            if num_bytes > MAX_BODY_BYTES:
                raise _too_large()
            if num_bytes > _SMALL_BYTES and self._num_bytes > MAX_BODIES_BYTES:
                raise Overloaded("too many large bodies at once")

        try:
            yield take
        finally:
            self._num_bytes -= num_bytes


BODIES = web.AppKey("bodies", Bodies)


async def read_object(request: web.Request) -> dict[str, Any]:
    """Read the body, wait for the call's turn, and parse it.

    Raises Refusal (size, type, encoding of the body), Overloaded, or InvalidRequest (its content).
    """
    _check_headers(request)
    door = request.app[APP_STATE].door
    with request.app[BODIES].one() as take:
        body = await in_time(_read(request, take))
        await door.arrivals.take()
        if len(body) > _LARGE_BYTES:
            async with door.large_bodies:
                return await asyncio.to_thread(parse_object, body)
        return parse_object(body)


async def in_time(reading: Awaitable[_T]) -> _T:
    """Await the reading of a body; raises Refusal if it takes longer than MAX_BODY_S."""
    try:
        async with asyncio.timeout(MAX_BODY_S):
            return await reading
    except TimeoutError:
        message = f"the body was not received within {MAX_BODY_S:g} s"
        raise Refusal(408, "request_timeout", message, is_fatal=True) from None


def _check_headers(request: web.Request) -> None:
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding != "identity":
        raise Refusal(
            415, "unsupported_encoding", "compressed bodies are not accepted", is_fatal=True
        )
    if request.content_type != "application/json" or "Content-Type" not in request.headers:
        raise Refusal(
            415,
            "unsupported_media_type",
            "the body must be JSON, with Content-Type: application/json",
            is_fatal=True,
        )
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise Refusal(415, "unsupported_encoding", "the body must be UTF-8", is_fatal=True)
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _too_large()


async def _read(request: web.Request, take: Callable[[int], None]) -> bytes:
    parts = []
    async for part in request.content.iter_any():
        take(len(part))
        parts.append(part)
    return b"".join(parts)


def _too_large() -> Refusal:
    message = f"the body is larger than {MAX_BODY_BYTES} bytes"
    return Refusal(413, "request_too_large", message, is_fatal=True)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises InvalidRequest."""
    if body.startswith(_BOM):
        raise InvalidRequest("the body begins with a byte order mark", code="invalid_encoding")
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8", code="invalid_encoding") from None
    value = _parse(text)
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_value")
    return value


def _parse(text: str) -> Any:
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
            parse_float=_float,
            # Called for each integer: slow, but in a large body it lets other threads run.
            parse_int=_not_minus_zero if "-0" in text or len(text) > _LARGE_BYTES else None,
        )
    except json.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg} at character {error.pos}"
        raise InvalidRequest(message, code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # an integer of more digits than Python converts
        raise InvalidRequest("the body has an endless number", code="invalid_number") from None
    if _SURROGATE.search(text):
        _check_surrogates(value)
    return value


def _no_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"{name} is not a JSON number", code="invalid_number")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses duplicate names: parsers differ in which of the values they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)[:_MAX_SHOWN]
        param = twice if twice.isprintable() else None
        raise InvalidRequest(f"an object has {twice!r} twice", param, "duplicate_field")
    return found


def _float(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise InvalidRequest(f"{literal:.20} is out of range", code="invalid_number")
    if value == 0 and literal[0] == "-":
        raise _minus_zero()
    return value


def _not_minus_zero(literal: str) -> int:
    if literal == "-0":
        raise _minus_zero()
    return int(literal)


def _minus_zero() -> InvalidRequest:
    return InvalidRequest("-0 is not a number here: write 0", code="invalid_number")


def _too_deep() -> InvalidRequest:
    return InvalidRequest("the body is nested too deeply", code="json_too_deep")


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "the body has half of a surrogate pair"
        raise InvalidRequest(message, code="invalid_encoding") from None
    except RecursionError:  # json.loads took this depth, json.dumps does not
        raise _too_deep() from None
