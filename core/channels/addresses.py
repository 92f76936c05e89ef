"""What others dial to reach a node, in the words in which the node makes it known.

Handshakes name the dialled address, so both ends must mean the same by it. Resolves nothing.
"""

from __future__ import annotations

import socket

from ..config import NodeConfig


def addresses_of(node: NodeConfig) -> tuple[str, ...]:
    """host:port as others dial it: first what the directory gets."""
    host = socket.gethostname() if node.host in ("0.0.0.0", "::") else node.host
    listening = f"[{host}]:{node.port}" if ":" in host else f"{host}:{node.port}"
    return (*(node.advertise or listening).split(","), listening)


def host_of(address: str) -> str:
    """Of host:port, where host may be an IPv6 address in brackets."""
    return address.rpartition(":")[0].strip("[]")
