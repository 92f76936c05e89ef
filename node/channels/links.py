"""A link of an engine, one channel and who is at its other end, and what the loop gets of it."""

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
    `peer`: what the directory calls the engine at the other end, for people; empty: unknown.

    `ended_by`: why it is over, for people. `opens_late`: of a source that hands nothing off to us,
    whose pool need not be opened before something is pulled.
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
    """What the other end of a link sent, a gateway or a peer."""

    link: Link
    message: node_pb2.GatewayMessage | Message | Refused


@dataclass(frozen=True, slots=True)
class LinkOver:
    """Nothing more will come: `error` is why, which is not sent to the other end."""

    link: Link
    error: BatonError


# A link itself stands, and is the loop's from now on.
ChannelItem: TypeAlias = Link | Received | LinkOver
