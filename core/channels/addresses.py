"""What others dial to reach a node and its engines, in the words in which they are made known.

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


def engine_addresses_of(node: NodeConfig, port: int) -> tuple[str, ...]:
    """The same for the engine that listens at `port`."""
    listening = [f"{address.rpartition(':')[0]}:{port}" for address in addresses_of(node)]
    advertised = node.advertise_engine.split(",") if node.advertise_engine else []
    return (*advertised, *listening)


def host_of(address: str) -> str:
    """Of host:port, where host may be an IPv6 address in brackets."""
    return address.rpartition(":")[0].strip("[]")
