"""Access of tests to pools: as the one puller of a source whose key is `ENGINE_KEY`."""

from __future__ import annotations

from baton.kv_transfer.window.network_address import RemotePool, pair_key

ENGINE_KEY = bytes(range(32))
PULLER = "cd" * 16


def access(
    name: str,
    port: int = 0,
    *,
    is_elsewhere: bool = False,
    engine_key: bytes = ENGINE_KEY,
    host: str = "127.0.0.1",
) -> RemotePool:
    """The access that the puller gets from a source's Hello and from the address it dialled."""
    return RemotePool(name, host, port, pair_key(engine_key, PULLER), is_elsewhere, PULLER)
