"""A host of --nnodes other than the first: runs ranks of the engine, which only follow rank 0.

    dial rank 0 for each rank ─► a process each, on its connection ─► one ends ─► end all, again

It is in no directory and unknown to gateways: the first host's node represents the whole engine. A
refusal by rank 0 ends this process; while rank 0 is unreachable, it retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from ...cluster.exposure import check_exposure, check_secret
from ...cluster.secret import ClusterSecret
from ...cluster.tls import ClusterTls
from ...core.channels.engine_tls import EngineTls, plain_end
from ...core.config import ClusterConfig, NodeConfig
from ...core.engine_config import EngineConfig
from ...core.errors import NodeLost, PermissionDenied, StartupFailed, Unauthenticated
from ...core.membership import Role
from ...core.process.children import bound_to_us
from ...core.process.event_loop import StopSignals
from ...core.process.logs import print_line, set_up_logging
from ...engine.hosts.joining import HostSettings, JoinRequest, dial_head, request_of
from .engine_handle import KILLED_S
from .placement import engine_configs, engine_environment, engine_tls

_MODULE = "baton.node.engine_process.rank_process"
_AGAIN_S = 0.5
_HANG_UPS = 4  # in a row within the handshake: more than a restart of rank 0
_LOOK_S = 0.25  # interval at which the connections to rank 0 are polled for their end


async def run(role: Role, engine: EngineConfig, node: NodeConfig, cluster: ClusterConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises StartupFailed if rank 0 refuses
    this host."""
    signals = StopSignals()
    set_up_logging(f"{role.value} ranks", as_json=node.log_json)
    tls = ClusterTls.of(cluster)
    check_secret(f"host of {role.value} ranks", cluster)
    (config,) = engine_configs(engine, node)
    missing = () if tls else ("--cluster-ca", "--cluster-cert", "--cluster-key")
    host = await _own_address(config, node)
    check_exposure(f"host of {role.value} ranks", host, missing, is_accepted=node.insecure_bind)
    first, count = config.node_rank * config.ranks_per_host, config.ranks_per_host
    ranks = RankHost(
        config,
        [request_of(config, role.value, rank, host) for rank in range(first, first + count)],
        ClusterSecret.of(cluster).dialing_key,
        None if tls is None else engine_tls(tls),
    )
    stopping = asyncio.create_task(signals.stop.wait())
    running = asyncio.create_task(ranks.run())
    try:
        await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        running.cancel()
        await asyncio.wait({running}, timeout=KILLED_S)
        stopping.cancel()
    return 0


async def _own_address(config: EngineConfig, node: NodeConfig) -> str:
    """The address at which other hosts dial this one: --host, or else the local address of the
    route to the first host."""
    if node.host not in (NodeConfig().host, "0.0.0.0", "::"):
        return node.host

    def look() -> str:
        family = socket.AF_INET6 if ":" in (config.master_addr or "") else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((config.master_addr, config.master_port))
            return str(probe.getsockname()[0])

    try:
        return await asyncio.to_thread(look)
    except OSError as error:
        raise StartupFailed(f"--master-addr {config.master_addr}: {error}") from error


@dataclass(eq=False)
class RankHost:
    """This host's ranks, which join the engine again after each end."""

    _config: EngineConfig
    _requests: Sequence[JoinRequest]
    _key: bytes = field(repr=False)
    _tls: EngineTls | None
    _said: str = ""

    async def run(self) -> None:
        """Until cancelled. Raises StartupFailed."""
        num_hang_ups = 0
        while True:
            with contextlib.ExitStack() as connections:
                try:
                    joined = [await self._dial(each, connections) for each in self._requests]
                    num_hang_ups = 0
                    await self._live(joined)
                    self._say(f"the engine at {self._config.master} has ended")
                except (Unauthenticated, PermissionDenied) as error:
                    raise StartupFailed(
                        f"{self._config.master} refuses this host: {error.message}",
                        hint="the same command on all hosts, except for --node-rank and --host",
                    ) from error
                except NodeLost as error:
                    num_hang_ups += 1
                    if num_hang_ups == _HANG_UPS:
                        raise StartupFailed(
                            f"{self._config.master} hangs up during the handshake: {error.message}",
                            hint="the same BATON_CLUSTER_SECRET, and TLS on all hosts or on none",
                        ) from error
                except OSError as error:
                    num_hang_ups = 0
                    self._say(f"waiting for rank 0 at {self._config.master}: {error}")
            await asyncio.sleep(_AGAIN_S)

    def _say(self, line: str) -> None:
        """Print a line for people, unless it equals the last one."""
        if line != self._said:
            self._said = line
            print_line(line)

    async def _dial(self, request: JoinRequest, opened: contextlib.ExitStack) -> socket.socket:
        """A blocking connection, without TLS, for a rank. Raises as `dial_head`."""
        secure = None if self._tls is None else self._tls.puller_wrap()
        connection = await asyncio.to_thread(dial_head, self._config, self._key, request, secure)
        if isinstance(connection, ssl.SSLSocket):
            connection = plain_end(connection)
        connection.setblocking(True)
        return opened.enter_context(connection)

    async def _live(self, connections: Sequence[socket.socket]) -> None:
        """Start the ranks; kill them all once one has ended, or when cancelled."""
        processes: list[asyncio.subprocess.Process] = []
        try:
            with _store(len(connections)) as store:
                for connection, request in zip(connections, self._requests, strict=True):
                    processes.append(await self._start(connection, request, store))
            numbers = ", ".join(str(request.rank) for request in self._requests)
            self._say(f"joined: ranks {numbers} of the engine at {self._config.master}")
            ends = [asyncio.ensure_future(process.wait()) for process in processes]
            # Rank 0 may also have given up on a process that hangs.
            while not (any(end.done() for end in ends) or any(map(_is_over, connections))):
                await asyncio.wait(ends, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*(process.wait() for process in processes))

    async def _start(
        self, connection: socket.socket, request: JoinRequest, store: socket.socket | None
    ) -> asyncio.subprocess.Process:
        """`store`: the socket at which ranks of this host rendezvous; the first one listens."""
        config, index = self._config, self._requests.index(request)
        store_port = 0 if store is None else store.getsockname()[1]
        store_fd = store.fileno() if store is not None and index == 0 else None
        settings = HostSettings(
            *(request.host, config.model, config.device, config.num_threads),
            *(self._tls, store_port, store_fd),
        )
        command = [sys.executable, "-m", _MODULE, str(connection.fileno())]
        fds = [connection.fileno(), *([] if store_fd is None else [store_fd])]
        return await asyncio.create_subprocess_exec(
            *bound_to_us([*command, msgspec.json.encode(settings).decode()], signal.SIGKILL),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=fds,
            env=os.environ | engine_environment(config),
        )


def _is_over(connection: socket.socket) -> bool:
    """Whether rank 0 has closed its end; data that it has sent is left to the rank."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)  # and errors, which poll always reports
    return bool(poll.poll(0))


@contextlib.contextmanager
def _store(num_ranks: int) -> Iterator[socket.socket | None]:
    """A listening loopback socket for the rendezvous of several ranks; None for one rank."""
    if num_ranks == 1:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener
