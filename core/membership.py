"""What one engine announces to the cluster, and the directory of all engines. Entries are hints for
discovery, checked again on connecting.

The types of Member's fields limit what an entry of the directory (cluster/entries.py) may contain.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeAlias

from msgspec import Meta

HEX_ID = r"\A[0-9a-f]{32}\Z"
_ADDRESS = r"\A(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}\Z"

_Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
_Name: TypeAlias = Annotated[_Text, Meta(min_length=1)]
HexId: TypeAlias = Annotated[str, Meta(pattern=HEX_ID)]
_Address: TypeAlias = Annotated[_Text, Meta(pattern=_ADDRESS)]
Count: TypeAlias = Annotated[int, Meta(gt=0, le=2**40)]


class Role(enum.Enum):
    """What a node's engines are used for. Every engine can do both."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Member:
    """One engine of one node.

    `incarnation` (32 hex digits) is drawn at every start of the engine process and identifies it
    everywhere; `address` is the host:port of its node's gRPC server, `engine_address` that of the
    engine itself; processes with the same `host_id` (32 hex digits) reach it by a unix socket.
    `name` and `device` ("cpu", "cuda:0,1", empty if none was set) are for people.
    `can_constrain`: accepts requests with a constraint.
    """

    incarnation: HexId
    role: Role
    name: _Name
    address: _Address
    model: _Name
    fingerprint: _Name
    max_model_len: Count
    block_size: Count
    num_blocks: Count
    engine_address: _Address = ""
    host_id: HexId = ""
    device: _Text = ""
    can_constrain: bool = False


class Directory(Protocol):
    """The engines of the cluster. Entries are hints for discovery, never a proof of life.

    `is_away`: the directory is unreachable now.
    """

    @property
    def is_away(self) -> bool: ...

    async def announce(self, member: Member, ttl_s: float) -> None: ...

    async def withdraw(self, incarnation: str) -> None: ...

    def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """Yield the whole membership at once and again after every change."""
        ...

    async def close(self) -> None: ...
