"""core/channels/handshake.py as the first messages of a stream between two processes.

dialer: opening ─► ◄─ challenge, answer ─► ◄─ accepted; then whatever the stream is for
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError

from ..core.channels.handshake import Dialer, Listener, Opening
from ..core.errors import Unauthenticated
from .secret import ClusterSecret

# Purposes: one a method.
LEDGERS, MEMBERS = b"ledgers", b"members"
ANY_ENGINE = "0" * 32  # whom a call dials that is for all engines of a node

ACCEPTED = b"accepted"
ADMIT_S = 2.0  # how long a dialer may take

Write: TypeAlias = Callable[[bytes], Awaitable[None]]
Read: TypeAlias = Callable[[], Awaitable[bytes]]  # b"": the stream brought something else


async def dial(
    call: Any,
    message: Callable[..., Any],
    secret: ClusterSecret,
    purpose: bytes,
    *,
    listener: str,
    address: str,
    dialer: str | None = None,
) -> None:
    """The dialer's part on a gRPC stream whose messages have the field `handshake`.

    `dialer`: our incarnation, if we are an engine. Returns once the listener has proven itself and
    accepted us. Raises Unauthenticated, or what gRPC raises.
    """
    us = dialer or secrets.token_hex(16)
    ours = Dialer(secret.dialing_key, purpose, dialer=us, listener=listener, address=address)
    await call.write(message(handshake=ours.opening))
    await call.write(message(handshake=ours.answer(await _read(call))))
    if await _read(call) != ACCEPTED:
        raise Unauthenticated("the listener did not accept us")


async def _read(call: Any) -> bytes:
    """Empty where something else came."""
    said: bytes = getattr(await call.read(), "handshake", b"")  # EOF has none
    return said


def listener_ends(
    requests: AsyncIterator[Any], context: Any, message: Callable[..., Any]
) -> tuple[Read, Write]:
    """What `admit` needs, on a gRPC stream whose messages have the field `handshake`."""

    async def read() -> bytes:
        try:
            said: bytes = (await anext(requests)).handshake
        except DecodeError:
            raise Unauthenticated("what came is no message of a handshake") from None
        return said

    async def write(said: bytes) -> None:
        await context.write(message(handshake=said))

    return read, write


async def admit(listener: Listener, read: Read, write: Write) -> Opening:
    """Who dials, which is proven; to accept it, write `ACCEPTED`. Raises Unauthenticated."""
    try:
        await write(listener.challenge(await read()))
        return listener.check(await read())
    except StopAsyncIteration:
        raise Unauthenticated("the stream ended within the handshake") from None
