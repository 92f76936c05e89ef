"""How a process gets a direct channel to an engine of its host: it connects, asks and is accepted.

    puller, or gateway                              engine
      │ connect "\\0baton-direct-<uid>-<incarnation>"  │ same user?
      │ ── who asks whom, token ──────────────────►   │ linked, and was told this token?
      │ ◄──────────────────────────────── ACCEPTED ──  │
      │ ◄────────────────── messages ─────────────►   │
    same user?

Who asks has a link to the engine already, over which both have proven what they are; the token was
drawn for that link, came over it, and is good for one channel.
"""

from __future__ import annotations

import enum
import re
import socket
import struct
from dataclasses import dataclass

from ..errors import HandoffFailed
from .direct_channel import DirectChannel
from .framing import MAX_FRAME_BYTES
from .same_host import require_same_user, socket_address

PURPOSE = "direct"
TOKEN_BYTES = 32
ACCEPTED = b"BATONOK1"

_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)
_QUESTION = struct.Struct(f"=8s16s16s{TOKEN_BYTES}s")
QUESTION_BYTES = _QUESTION.size


class Asker(enum.Enum):
    """Who may ask; the value is what a question begins with."""

    PULLER = b"BATONDR1"
    GATEWAY = b"BATONGW1"


@dataclass(frozen=True, slots=True)
class Question:
    """`engine`: whose channel is wanted; `name`: a puller's incarnation, or the id that a
    gateway's stream has at the engine. Both are 32 hex digits."""

    asker: Asker
    engine: str
    name: str
    token: bytes

    def pack(self) -> bytes:
        """Raises HandoffFailed unless name and token are of the right form."""
        if len(self.token) != TOKEN_BYTES or not _NAME.fullmatch(self.name):
            raise HandoffFailed("it offers no direct channel")
        names = (bytes.fromhex(self.engine), bytes.fromhex(self.name))
        return _QUESTION.pack(self.asker.value, *names, self.token)

    @classmethod
    def unpack(cls, packed: bytes) -> Question | None:
        """None: a stranger says something else."""
        if len(packed) != QUESTION_BYTES:
            return None
        magic, engine, name, token = _QUESTION.unpack(packed)
        if magic not in _MAGICS:
            return None
        return cls(Asker(magic), engine.hex(), name.hex(), token)


_MAGICS = frozenset(asker.value for asker in Asker)


def ask(question: Question) -> DirectChannel:
    """Connect to the engine and put the question; until it has accepted nothing more may be said.

    Raises HandoffFailed, ChannelBroken or OSError: it cannot be reached, or not by this user.
    """
    address, packed = socket_address(question.engine, PURPOSE), question.pack()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(address)
        require_same_user(connection)
        channel = DirectChannel(connection, len(ACCEPTED), MAX_FRAME_BYTES)
        channel.send(packed)
    except BaseException:  # whatever it is, nobody else would close it
        connection.close()
        raise
    return channel
