"""`--workers N`: a gateway of N processes on the same two ports, and the parent that keeps them.

    clients ──► port (SO_REUSEPORT: the kernel deals connections) ─┬─► worker 0 ──► all nodes
                                                                   ├─► worker 1 ──► all nodes
    parent: no requests, no gRPC; starts, restarts, stops ─────────┴─► worker 2 ──► all nodes
Workers share nothing but Redis: each has its own links, sessions and part of every limit. One whose
event loop stands still is killed (core/process/loop_watch.py). One that ends is started again,
later each time; its connections are lost, the others' are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from ...cluster.exposure import check_secret
from ...core.config import ClusterConfig, GatewayConfig
from ...core.errors import StartupFailed
from ...core.process.children import bound_to_us
from ...core.process.logs import set_up_logging
from ...core.process.loop_watch import LoopWatch, show_turns
from ...core.process.runtime_folder import RuntimeFolder
from ...core.process.stop_signals import StopSignals
from ..security.worker_place import WorkerOrder, WorkerPlace

log = logging.getLogger(__name__)

_RESTART_MIN_S = 0.1
_RESTART_MAX_S = 5.0
_WELL_S = 30.0  # one that lived so long is started again at once
_LAST_WORD_S = 5.0  # behind --shutdown-timeout-s: to close connections and exit


class _Worker:
    """One place; `run` keeps a process in it."""

    def __init__(self, order: WorkerOrder) -> None:
        self._order = order
        self._process: asyncio.subprocess.Process | None = None
        self._has_lived = False
        self.ready = asyncio.Event()
        self.ready_line = ""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Until cancelled. Raises StartupFailed if the first process ends before it is ready."""
        delay_s = _RESTART_MIN_S
        while True:
            began_s = time.monotonic()
            code = await self._live()
            index = self._order.place.index
            if not self.ready.is_set():
                raise StartupFailed(f"worker {index} ended with code {code}; its words are above")
            if time.monotonic() - began_s > _WELL_S:
                delay_s = _RESTART_MIN_S
            log.error("worker %d ended with code %s: again in %.1f s", index, code, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _RESTART_MAX_S)

    async def _live(self) -> int:
        with LoopWatch() as watch:
            process = await asyncio.create_subprocess_exec(
                *bound_to_us(
                    [sys.executable, "-m", "baton.gateway.process.worker"], signal.SIGTERM
                ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONSAFEPATH": "1"} | watch.environment,
                pass_fds=[watch.fd],
                start_new_session=True,  # Ctrl-C reaches us alone, or they would take it twice
            )
            self._process = process
            watching = asyncio.create_task(self._kill_when_hung(process, watch))
            try:
                await self._talk(process)
                return await process.wait()
            finally:
                watching.cancel()

    async def _talk(self, process: asyncio.subprocess.Process) -> None:
        """Give it its order, and read what it says until it ends."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it is dead already: its code says why
            process.stdin.write(self._order.to_json().encode() + b"\n")
            await process.stdin.drain()
        async for line in process.stdout:
            if not line.startswith(b"ready: "):
                if self._order.place.index == 0 and not self._has_lived:
                    print(line.decode(), end="", flush=True)  # one greeting is enough
            elif not self.ready.is_set():
                self.ready_line = line.decode().strip()
                self.ready.set()
        self._has_lived = True

    async def _kill_when_hung(self, process: asyncio.subprocess.Process, watch: LoopWatch) -> None:
        await watch.until_hung()
        index = self._order.place.index
        log.error("worker %d: its event loop stood still for %g s: killed", index, watch.hung_s)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    def ask_to_stop(self) -> None:
        """Asked twice, it hurries."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and see to it that it does."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        self.ask_to_stop()
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            log.error("worker %d does not end: killed", self._order.place.index)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def run(config: GatewayConfig, cluster: ClusterConfig) -> int:
    """The parent process: until SIGINT or SIGTERM. Returns the exit code."""
    set_up_logging("gateway", as_json=config.log_json)
    check_secret("gateway", cluster)
    signals = StopSignals()
    with (
        RuntimeFolder.make("baton-gateway-") as folder,
        _reserved(config.host, config.http_port, "--http-port") as http_port,
        _reserved(config.host, config.grpc_port, "--grpc-port") as grpc_port,
    ):
        here = replace(config, http_port=http_port, grpc_port=grpc_port)
        key = secrets.token_hex(32)
        count, path = config.workers, str(folder.path)
        places = [WorkerPlace(index, count, path, key) for index in range(count)]
        workers = [_Worker(WorkerOrder(here, cluster, place)) for place in places]
        await _keep(workers, signals, config.shutdown_timeout_s + _LAST_WORD_S)
    return 0


async def _keep(workers: list[_Worker], signals: StopSignals, grace_s: float) -> None:
    """Run all workers until they shall stop; says `ready:` once, when all are."""
    turning = asyncio.create_task(show_turns())
    keepers = [asyncio.create_task(worker.run()) for worker in workers]
    ready = asyncio.create_task(_all_ready(workers))
    stopping = asyncio.create_task(signals.stop.wait())
    try:
        await asyncio.wait({stopping, *keepers}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (ready, stopping, turning, *keepers):
            task.cancel()
        hurrying = asyncio.create_task(_pass_on(signals.hurry, workers))
        await asyncio.gather(*(worker.stop(grace_s) for worker in workers))
        hurrying.cancel()
        ended = await asyncio.gather(*keepers, return_exceptions=True)
    for outcome in ended:
        if isinstance(outcome, Exception):
            raise outcome


async def _pass_on(hurry: asyncio.Event, workers: list[_Worker]) -> None:
    await hurry.wait()
    for worker in workers:
        worker.ask_to_stop()


async def _all_ready(workers: list[_Worker]) -> None:
    for worker in workers:
        await worker.ready.wait()
    pids = " ".join(str(worker.pid) for worker in workers)
    log.info("%d workers: %s", len(workers), pids)
    print(workers[0].ready_line, flush=True)


@contextlib.contextmanager
def _reserved(host: str, port: int, flag: str) -> Iterator[int]:
    """Hold a port for the workers; 0 finds a free one. Raises StartupFailed where it is taken.

    The socket that holds it never listens, so no connection comes to it.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)  # fails even if the other one would share
            found = alone.getsockname()[1]
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((address[0], found, *address[2:]))
    except OSError as error:
        raise StartupFailed(
            f"the gateway cannot listen on {host}:{port}",
            hint=f"the port is taken or the address is not this host's: another {flag} "
            "(0 takes a free one) or --host",
        ) from error
    with holder:
        yield found
