"""The KV pools of an engine's ranks as others find them: named, described, exported.

Rank 0 draws the names and owns the generations; each rank exports its own pool to this host, and a
source's ranks serve theirs to other hosts too, each on a port of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..core.config import NodeConfig
from ..core.ports import Entropy
from ..core.same_host import host_id
from ..engine.followers import Followers
from ..engine.generations import GenerationsReader
from ..engine.kv_memory import CpuKvMemory
from ..engine.rank_channel import Kind
from ..engine.runner import ModelRunner
from ..engine.sharding import heads_of_rank
from ..kv_transfer.cuda_ipc_memory import export_cuda_pool
from ..kv_transfer.data_server import DataServer, ServedPool
from ..kv_transfer.data_tls import DataTls
from ..kv_transfer.pool_address import PoolDescription, PoolPart
from ..kv_transfer.pool_exporter import PoolExporter
from ..kv_transfer.remote import KEY_BYTES, DataPort
from ..kv_transfer.shm import export_host_pool
from ..kv_transfer.transports import outlets


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """What rank 0 tells another rank; without `key` its pool is not served to other hosts."""

    pool: str
    parts: tuple[PoolPart, ...]
    node: NodeConfig
    tls: DataTls | None
    key: bytes | None

    def pack(self) -> bytes:
        key = None if self.key is None else self.key.hex()
        return json.dumps(dataclasses.asdict(self) | {"key": key}).encode()

    @classmethod
    def unpack(cls, packed: memoryview) -> ExportOrder:
        told = json.loads(bytes(packed))
        parts = tuple(PoolPart(**part) for part in told["parts"])
        key = None if told["key"] is None else bytes.fromhex(told["key"])
        tls = None if told["tls"] is None else DataTls(**told["tls"])
        return cls(told["pool"], parts, NodeConfig(**told["node"]), tls, key)


def pool_parts(
    runner: ModelRunner, size: int, incarnation: str, entropy: Entropy
) -> tuple[PoolPart, ...]:
    """The pools of all `size` ranks; rank 0's is named by the engine's incarnation."""
    names = [incarnation, *(entropy.new_id() for _ in range(1, size))]
    heads = [heads_of_rank(runner.model_config, rank, size) for rank in range(size)]
    return tuple(
        PoolPart(name, each.first_kv_head, each.num_kv_heads)
        for name, each in zip(names, heads, strict=True)
    )


@contextlib.contextmanager
def exported(
    runner: ModelRunner,
    followers: Followers | None,
    generations_fd: int,
    parts: Sequence[PoolPart],
    node: NodeConfig,
    tls: DataTls | None,
    *,
    is_source: bool,
) -> Iterator[DataPort | None]:
    """Rank 0: offer the pools of all ranks; a source's also over the network, at the port given.

    Raises StartupFailed.
    """
    key = secrets.token_bytes(KEY_BYTES) if is_source else None
    with contextlib.ExitStack() as offered:
        server = None if key is None else listen(runner, node, tls)
        ports = [0 if server is None else server.port]
        if followers is not None:
            orders = [
                ExportOrder(part.pool, tuple(parts), node, tls, key).pack() for part in parts[1:]
            ]
            _, answers = followers.ask(Kind.EXPORT_POOL, orders, [generations_fd])
            ports += [int(answer) for answer in answers]
        known = [
            dataclasses.replace(part, port=port) for part, port in zip(parts, ports, strict=True)
        ]
        offered.callback(export_pool(runner, parts[0].pool, generations_fd, known).close)
        if server is None or key is None:
            yield None
            return
        serve(server, runner, parts[0].pool, generations_fd, known, key)
        offered.callback(server.close)
        yield DataPort(host_id(), server.port, key)


def export_pool(
    runner: ModelRunner, name: str, generations_fd: int, parts: Sequence[PoolPart]
) -> PoolExporter:
    """Offer this rank's pool to the engines of this host, wherever it lies."""
    runner.write_canary(name)
    if isinstance(runner.kv, CpuKvMemory):
        return export_host_pool(name, runner.kv, generations_fd, parts)
    return export_cuda_pool(name, runner.kv, generations_fd, parts)


def listen(runner: ModelRunner, node: NodeConfig, tls: DataTls | None) -> DataServer:
    """A port for pullers of other hosts, at which nobody answers yet."""
    if tls is None:
        return DataServer(node.host, outlets(runner.kv))
    return DataServer(node.host, outlets(runner.kv), tls.wrap_source)


def serve(
    server: DataServer,
    runner: ModelRunner,
    name: str,
    generations_fd: int,
    parts: Sequence[PoolPart],
    key: bytes,
) -> None:
    """Answer there, for this rank's pool: its canary is written."""
    kv = runner.kv
    description = PoolDescription(name, kv.block_bytes, kv.num_blocks, parts=tuple(parts))
    generations = GenerationsReader(generations_fd, kv.num_blocks, parts[0].pool)
    server.start(ServedPool(description, generations, key))
