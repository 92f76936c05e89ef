"""Starts the product's processes as forks of one that has imported it: in 10 ms, not in 2 s.

    test process ── exec, once ──► server ── clone(CLONE_PARENT) ──► node
                                                      node ── fork ──► server of its own
                                                                       └── clone ──► engine

After `start`, `subprocess` and asyncio start in this way what they would start by `python -c` with
an entry of launch.py, or by `python -m` with an engine's module or `baton run-batch`. Otherwise
such a process is as after an exec: a child of the process that started it, with its arguments and
environment (in /proc too), open files, session, signals and exit code. A process is started by exec
if its environment differs in a variable that an interpreter or a library reads at its start, and in
tests that use `real_starts`. What commands start (`baton up`) is started by exec as well.

The server has one thread, or forks would not be safe.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SERVER = "from preloaded.server import be_first_server; be_first_server()"
SERVER_NAME = "fork-server"  # in /proc/PID/comm
_ENTRY = "from baton.cli.launch import "
_ENGINES = (
    *("baton.prefill_node.engine_main", "baton.decode_node.engine_main"),
    "baton.engine.parallel.rank_worker",  # a rank of an engine without a node
)
_BATCH = ["baton", "run-batch"]
_READ_AT_START = ("PYTHON", "LD_", "OMP_", "MALLOC_", "TRITON_", "TORCH", "CUDA_", "MKL_", "GLIBC_")
_AS_IN_SERVER = {"PYTHONSAFEPATH", "PYTHONUNBUFFERED"}
_ROOM = 16384  # bytes for the arguments, and as many for the environment, that /proc shows
_PR_GET_TID_ADDRESS = 40
_BIND = ["-IS", "-c"]  # how core/process/children.py begins a command that is bound to its parent
HEAD = struct.Struct("<II")  # bytes that follow, file descriptors

_real_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_server: Link | None = None
_are_starts_real = False


class Link:
    """The connection to this process's server."""

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self._connection = connection
        self._relevant = _relevant(environment)
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def can_start(self, environment: Mapping[str, str]) -> bool:
        return self._owner == os.getpid() and _relevant(environment) == self._relevant

    def start(self, order: dict[str, Any], files: Sequence[int]) -> int:
        """Returns the child's pid."""
        payload = json.dumps(order).encode()
        with self._lock:
            socket.send_fds(self._connection, [HEAD.pack(len(payload), len(files))], files)
            self._connection.sendall(payload)
            return int.from_bytes(read(self._connection, 4), "little")


def _relevant(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name not in _AS_IN_SERVER
    }


def read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (part := connection.recv(size - len(found))):
            raise EOFError
        found += part
    return found


# -- the requesting process ----------------------------------------------------------------------


def start() -> None:
    """Start the server from the main thread: processes bound to their parent end with that
    thread."""
    global _server
    if _server is not None or not _is_possible():
        return
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "GRPC_VERBOSITY": "ERROR",
        "_ROOM": "-" * _ROOM,
    }
    here = str(Path(__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {here!r}); {_SERVER}"
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno()), "-" * _ROOM],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            pass_fds=[theirs.fileno()],
        ).returncode = 0  # never waited for: it ends with us
    read(ours, 1)
    use(Link(ours, environment))


def _is_possible() -> bool:
    return sys.platform == "linux" and os.uname().machine == "x86_64" and tid_address() is not None


def use(server: Link) -> None:
    global _server
    _server = server
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


@contextmanager
def real_starts() -> Iterator[None]:
    """Processes started meanwhile are started by exec."""
    global _are_starts_real
    _are_starts_real = True
    try:
        yield
    finally:
        _are_starts_real = False


def children_of(pid: int) -> list[int]:
    """Children of the process's main thread, without our server."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if not _is_server(child)]


def _is_server(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == SERVER_NAME
    except OSError:
        return False


def _execute_child(
    self: Any,
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: Sequence[int],
    cwd: Any,
    env: Mapping[str, str] | None,
    *others: Any,
) -> None:
    """Replaces Popen's: `others` begin with startupinfo, creationflags, shell and the pipes."""
    p2cread, _, _, c2pwrite, _, errwrite = pipes = others[3:9]
    start_new_session = others[-2]
    environment = dict(os.environ if env is None else env)
    program = None if isinstance(args, (str, bytes)) else _program([os.fsdecode(a) for a in args])
    is_plain = executable in (None, sys.executable, *args[:1]) and not preexec_fn and not others[2]
    if (
        program is None
        or not is_plain
        or _are_starts_real
        or _server is None
        or not _server.can_start(environment)
    ):
        _real_execute(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)
        return
    places = [0, 1, 2, *pass_fds]
    standard = (
        fd if fd != -1 else number for number, fd in enumerate((p2cread, c2pwrite, errwrite))
    )
    bind, argv = program
    order = {
        "argv": argv,
        "environment": environment,
        "cwd": os.fsdecode(cwd) if cwd else os.getcwd(),
        "is_session": bool(start_new_session),
        "bind": bind,
        "parent": os.getpid(),
        "places": places,
    }
    self.pid = _server.start(order, [*standard, *pass_fds])
    self._child_created = True
    self._close_pipe_fds(*pipes)


def _program(command: list[str]) -> tuple[int, list[str]] | None:
    """(the signal that binds it to its parent, or 0; arguments) of a command that a fork can
    run."""
    bind = 0
    if command[1:3] == _BIND and len(command) > 6 and "getppid" in command[3]:
        bind, command = int(command[4]), command[6:]
    if command[:1] != [sys.executable] or len(command) < 3:
        return None
    is_entry = command[1] == "-c" and _ENTRY in command[2]
    is_module = command[1] == "-m" and (command[2] in _ENGINES or command[2:4] == _BATCH)
    return (bind, command) if is_entry or is_module else None


def tid_address() -> int | None:
    """Where glibc stores the thread's id: its fork has the kernel write it, and so does ours."""
    address = ctypes.c_void_p()
    failed = ctypes.CDLL(None).prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return None if failed else address.value


# -- asyncio, where its loop is uvloop, which starts processes without `subprocess` ----------------


class _Process:
    """The part of asyncio.subprocess.Process that the product uses."""

    def __init__(self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader | None):
        self.pid, self.stdout = process.pid, stdout
        self._process = process
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        code: int = self._process.returncode
        return code

    def send_signal(self, number: int) -> None:
        if self._process.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_real_create = asyncio.create_subprocess_exec


async def create_subprocess_exec(*command: Any, limit: int = 2**16, **how: Any) -> Any:
    is_ours = _program([os.fsdecode(each) for each in command]) is not None
    environment = how.get("env") or os.environ
    if not is_ours or _server is None or not _server.can_start(environment):
        return await _real_create(*command, limit=limit, **how)
    process = subprocess.Popen(command, **how)  # noqa: ASYNC220 (forked, at once)
    stdout = None
    if process.stdout is not None:
        stdout = asyncio.StreamReader(limit=limit)
        protocol = asyncio.StreamReaderProtocol(stdout)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, process.stdout)
    return _Process(process, stdout)
