"""A link of an engine, a channel and who is at its other end, and the loop's items of links."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from ...core.channels.channel import Channel
from ...core.errors import BatonError
from ...kv_transfer.protocol.messages import Message, Refused
from ...proto.v1 import node_pb2


class Kind(enum.Enum):
    """Who is at the other end of a channel."""

    GATEWAY = "gateway"
    PULLER = "puller"  # it pulls from us
    SOURCE = "source"  # we pull from it


@dataclass(slots=True, eq=False)
class Link:
    """One channel. `name`: a gateway's id or a peer's incarnation; `host`: where it was dialled;
    `peer`: the directory's name of the engine at the other end, for logs; empty: unknown.

    `ended_by`: why it ended, for logs. `opens_late`: a source that hands nothing off to this
    engine, whose pool the first pull opens.
    """

    kind: Kind
    name: str
    channel: Channel
    host: str = ""
    ended_by: str = ""
    opens_late: bool = False
    peer: str = ""

    def __str__(self) -> str:
        """For log lines."""
        return f"{self.kind.value} {f'{self.peer} ({self.name})' if self.peer else self.name}"


@dataclass(frozen=True, slots=True)
class Received:
    """A message from the other end of a link."""

    link: Link
    message: node_pb2.GatewayMessage | Message | Refused


@dataclass(frozen=True, slots=True)
class LinkOver:
    """A link has ended; `error` is the reason, which is not sent to the other end."""

    link: Link
    error: BatonError


# A Link itself: a new one, which the loop owns from then on.
ChannelItem: TypeAlias = Link | Received | LinkOver
