"""The handshake of core/handshake.py as the first messages of a stream between two processes.

    dialer: opening ─► ◄─ challenge, answer ─► ◄─ accepted (empty); then whatever the stream is for
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from ..core.handshake import Dialer, Listener, Opening

SESSION, HANDOFF, LEDGERS = b"session", b"handoff", b"ledgers"  # purposes: one a method
ANY_ENGINE = "0" * 32  # whom a call dials that is for all engines of a node

ADMIT_S = 2.0  # how long a dialer may take

Write: TypeAlias = Callable[[bytes], Awaitable[None]]
Read: TypeAlias = Callable[[], Awaitable[bytes]]  # b"": the stream brought something else


async def dial(dialer: Dialer, write: Write, read: Read) -> None:
    """Returns once the listener has proven itself and accepted us. Raises Unauthenticated."""
    await write(dialer.opening)
    await write(dialer.answer(await read()))
    await read()


async def admit(listener: Listener, write: Write, read: Read) -> Opening:
    """Whom to serve on this stream. Raises Unauthenticated."""
    await write(listener.challenge(await read()))
    opening = listener.check(await read())
    await write(b"")
    return opening
