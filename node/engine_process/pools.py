"""The KV pools of an engine's ranks as other engines reach them: names, descriptions, exports.

Rank 0 draws the names and the key, and owns the generations; each rank exports its own pool to
processes of its host, and serves it to other hosts on a port of its own, if that may be needed.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, product

import msgspec
from msgspec.structs import replace

from ...cluster.exposure import is_loopback
from ...core.channels.addresses import engine_addresses_of, host_id, host_of
from ...core.channels.engine_tls import EngineTls
from ...core.config import NodeConfig
from ...core.errors import StartupFailed
from ...core.ports import Entropy
from ...engine.execution.runner import ModelRunner
from ...engine.kv.generations import GenerationsReader
from ...engine.kv.kv_memory import CpuKvMemory
from ...engine.model.sharding import heads_of_rank
from ...engine.parallel.rank_channel import MessageKind
from ...engine.parallel.rank_group import RankGroup
from ...kv_transfer.cuda_ipc.cuda_ipc_memory import memory_of
from ...kv_transfer.device_transports import outlets
from ...kv_transfer.export.pool_address import PoolDescription, PoolExporter, PoolPart
from ...kv_transfer.network.data_server import DataServer, ServedPool
from ...kv_transfer.window.network_address import KEY_BYTES, PoolAccess

_BY_MEMORY = frozenset({"auto", "shm", "cuda_ipc", "cuda_staged"})


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """The order of rank 0 to another rank; `key`: that of the engine."""

    pool: str
    parts: tuple[PoolPart, ...]
    node: NodeConfig
    tls: EngineTls | None
    key: bytes


def pool_parts(
    runner: ModelRunner,
    size: int,
    incarnation: str,
    entropy: Entropy,
    hosts: Iterable[str],
) -> tuple[PoolPart, ...]:
    """The pools of all ranks, `size` per stage, on `hosts` (empty string: rank 0's host); rank 0's
    pool is named by the engine's incarnation."""
    names = chain([incarnation], (entropy.new_id() for _ in count()))
    heads = [heads_of_rank(runner.model_config, rank, size) for rank in range(size)]
    # A draft model's layers follow the model's; it requires a single stage.
    num_drafting = runner.kv.layout.num_layers - len(runner.layers)
    layers = [(stage.first, len(stage) + num_drafting) for stage in runner.stages]
    return tuple(
        PoolPart(name, (of.first_kv_head, of.num_kv_heads), of_stage, host=host)
        for (of_stage, of), name, host in zip(product(layers, heads), names, hosts, strict=False)
    )


@contextlib.contextmanager
def exported(
    runner: ModelRunner,
    followers: RankGroup | None,
    generations_fd: int,
    parts: Sequence[PoolPart],
    node: NodeConfig,
    tls: EngineTls | None,
) -> Iterator[PoolAccess]:
    """On rank 0: offer the pools of all ranks by the transports that `--kv-transport` allows.

    Raises StartupFailed.
    """
    key = secrets.token_bytes(KEY_BYTES)
    with contextlib.ExitStack() as offered:
        mine = Offer(runner, node, tls, key, is_spread=any(part.host for part in parts))
        offered.callback(mine.close)
        ports = [mine.port]
        if followers is not None:
            orders = [ExportOrder(part.pool, tuple(parts), node, tls, key) for part in parts[1:]]
            payloads = [msgspec.msgpack.encode(order) for order in orders]
            _, answers = followers.order_and_wait(
                MessageKind.EXPORT_POOL, payloads, [generations_fd]
            )
            ports += [int(answer) for answer in answers]
        known = [replace(part, port=port) for part, port in zip(parts, ports, strict=True)]
        mine.begin(parts[0].pool, generations_fd, known)
        yield PoolAccess(host_id(), mine.port, key)


class Offer:
    """One rank's pool, offered by shared memory, over a network, or both."""

    def __init__(
        self,
        runner: ModelRunner,
        node: NodeConfig,
        tls: EngineTls | None,
        key: bytes,
        *,
        is_spread: bool = False,
    ) -> None:
        """Listen for other hosts, if that may be needed, e.g. as the engine `is_spread` over
        several; nothing is served before `begin`. Raises StartupFailed."""
        self._runner = runner
        self._key = key
        self._by_memory = node.kv_transport in _BY_MEMORY
        self._server: DataServer | None = None
        self._begun = contextlib.ExitStack()
        if is_spread and node.kv_transport not in ("auto", "tcp"):
            raise StartupFailed(
                f"--kv-transport {node.kv_transport} is not for engines on several hosts",
                hint="--kv-transport tcp",
            )
        if is_spread or _needs_port(runner, node):
            names = [host_of(address) for address in engine_addresses_of(node, 0)]
            wrap = {} if tls is None else {"wrap": tls.source_wrap()}
            self._server = DataServer(
                node.host, names, outlets(runner.kv, is_spread=is_spread), **wrap
            )

    @property
    def port(self) -> int:
        """The port for other hosts, or 0."""
        return 0 if self._server is None else self._server.port

    def begin(self, name: str, generations_fd: int, parts: Sequence[PoolPart]) -> None:
        """Serve from now on: the ports of all ranks are known."""
        kv, key = self._runner.kv, self._key
        self._runner.write_canary(name)
        described = PoolDescription(name, kv.block_bytes, kv.num_blocks, parts=tuple(parts))
        if self._by_memory:
            if isinstance(kv, CpuKvMemory):
                exporter = PoolExporter(described, [kv.fd, generations_fd], key)
            else:
                on_gpu = replace(described, cuda=memory_of(kv))
                exporter = PoolExporter(on_gpu, [generations_fd], key)
            self._begun.callback(exporter.close)
        if self._server is not None:
            generations = GenerationsReader(generations_fd, kv.num_blocks, parts[0].pool)
            self._server.start(ServedPool(described, generations, key))
            self._begun.callback(self._server.close)

    def close(self) -> None:
        self._begun.close()


def _needs_port(runner: ModelRunner, node: NodeConfig) -> bool:
    """Whether a puller may have no better transport than the network.

    The memory of a CPU node that only this host can reach can always be mapped.
    """
    if node.kv_transport != "auto":
        return node.kv_transport not in _BY_MEMORY
    return not (isinstance(runner.kv, CpuKvMemory) and is_loopback(node.host))
