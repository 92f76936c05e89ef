"""What one engine announces to the cluster. A discovery hint, checked again on connecting."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.Enum):
    """What a node's engines are for. The engine itself can do both."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Member:
    """One engine of one node.

    `incarnation` (32 hex digits) is drawn anew at every start of the engine process and names it
    everywhere; `address` is the host:port of its node's gRPC server, `engine_address` where it
    listens itself; processes with the same `host_id` (32 hex digits) reach it by a unix socket.
    `name` and `device` ("cpu", "cuda:0,1", empty where nobody chose) are for people.
    `can_constrain`: takes requests with a constraint.
    """

    incarnation: str
    role: Role
    name: str
    address: str
    model: str
    fingerprint: str
    max_model_len: int
    block_size: int
    num_blocks: int
    engine_address: str = ""
    host_id: str = ""
    device: str = ""
    can_constrain: bool = False
