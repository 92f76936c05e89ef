"""Starts the product's processes as forks of one that has imported it: in 10 ms, not in 2 s.

    test process ── exec, once ──► server ── clone(CLONE_PARENT) ──► node ─ fork ─► server of its own
                                                                       └──── clone ────► engine

`start` has it that `subprocess` and asyncio start so what they would start by `python -c` with an
entry of launch.py or by `python -m` with an engine's module. All else about such a process is as
after an exec: it is a child of who asked, with its arguments and environment (in /proc too), open
files, session, signals and exit code. A process is started by exec as ever if its environment
differs in what an interpreter or a library reads at its start, and in tests that say
`preloaded.real_starts`. What commands start by themselves (`baton up`) is real as well.

The server has one thread, or forks would not be safe.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

_SERVER = "import preloaded; preloaded.be_first_server()"
_NAME = "fork-server"  # in /proc/PID/comm
_IMPORTED = (
    *("torch", "uvloop", "tokenizers", "baton.prefill_node.engine_main"),
    *("baton.decode_node.engine_main", "baton.node.supervisor.supervisor"),
    *("baton.gateway.process.server", "baton.cli.deployment.gateways"),
)
_ENTRY = "from baton.cli.launch import "
_ENGINES = ("baton.prefill_node.engine_main", "baton.decode_node.engine_main")
_READ_AT_START = ("PYTHON", "LD_", "OMP_", "MALLOC_", "TRITON_", "TORCH", "CUDA_", "MKL_", "GLIBC_")
_AS_IN_SERVER = {"PYTHONSAFEPATH", "PYTHONUNBUFFERED"}
_ROOM = 16384  # bytes for the arguments, and as many for the environment, that /proc shows
_CLONE_PARENT, _CHILD_CLEARTID, _CHILD_SETTID = 0x8000, 0x00200000, 0x01000000
_SYS_CLONE = 56  # of x86-64
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_GET_TID_ADDRESS = 1, 15, 40
_BIND = ["-IS", "-c"]  # how core/process/children.py begins a command that is bound to its parent
_HEAD = struct.Struct("<II")  # bytes that follow, file descriptors

_real_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_server: _Link | None = None
_are_starts_real = False


class _Link:
    """To the server of this process."""

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
            socket.send_fds(self._connection, [_HEAD.pack(len(payload), len(files))], files)
            self._connection.sendall(payload)
            return int.from_bytes(_read(self._connection, 4), "little")


def _relevant(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name not in _AS_IN_SERVER
    }


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (part := connection.recv(size - len(found))):
            raise EOFError
        found += part
    return found


# -- who asks --------------------------------------------------------------------------------------


def start() -> None:
    """Start the server, by the main thread: what is bound to its parent ends with that thread."""
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
    here = str(Path(__file__).parent)
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
    _read(ours, 1)
    _use(_Link(ours, environment))


def _is_possible() -> bool:
    return sys.platform == "linux" and os.uname().machine == "x86_64" and _tid_address() is not None


def _use(server: _Link) -> None:
    global _server
    _server = server
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


@contextmanager
def real_starts() -> Iterator[None]:
    """What is started meanwhile is started by exec."""
    global _are_starts_real
    _are_starts_real = True
    try:
        yield
    finally:
        _are_starts_real = False


def children_of(pid: int) -> list[int]:
    """Those of its main thread that the product knows of."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if not _is_server(child)]


def _is_server(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == _NAME
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
    """In place of Popen's: `others` begin with startupinfo, creationflags, shell and the pipes."""
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
        _real_execute(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others
        )
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
    """(signal that binds it to its parent or 0, arguments), of a command that a fork can run."""
    bind = 0
    if command[1:3] == _BIND and len(command) > 6 and "getppid" in command[3]:
        bind, command = int(command[4]), command[6:]
    if command[:1] != [sys.executable] or len(command) < 3:
        return None
    is_entry = command[1] == "-c" and _ENTRY in command[2]
    is_engine = command[1] == "-m" and command[2] in _ENGINES
    return (bind, command) if is_entry or is_engine else None


# -- the server ------------------------------------------------------------------------------------


def be_first_server() -> NoReturn:
    """The process that imports."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    _end_with_parent(signal.SIGKILL)
    gc.disable()
    for name in _IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    os.environ.pop("_ROOM")
    connection.sendall(b"!")
    _serve(connection)


def _serve(connection: socket.socket) -> NoReturn:
    """Fork whatever is asked for, as a child of our parent, until that is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME.encode(), 0, 0, 0)
    assert len(os.listdir("/proc/self/task")) == 1
    while True:
        try:
            order, files = _receive(connection)
        except (EOFError, OSError):
            os._exit(0)
        pid = _clone_beside()
        if pid == 0:
            connection.close()
            _become(order, files)
        for fd in files:
            os.close(fd)
        connection.sendall(pid.to_bytes(4, "little"))


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, files, _, _ = socket.recv_fds(connection, _HEAD.size, 64)
    if not head:
        raise EOFError
    head += _read(connection, _HEAD.size - len(head))
    size, num_files = _HEAD.unpack(head)
    order: dict[str, Any] = json.loads(_read(connection, size))
    assert len(files) == num_files
    return order, list(array.array("i", files))


def _tid_address() -> int | None:
    """Where glibc has the thread's id: its fork has the kernel write it, and so do we."""
    address = ctypes.c_void_p()
    failed = ctypes.CDLL(None).prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return None if failed else address.value


def _clone_beside() -> int:
    """os.fork(), but the child is one of our parent's."""
    libc, python = ctypes.PyDLL(None), ctypes.pythonapi
    flags = _CLONE_PARENT | _CHILD_SETTID | _CHILD_CLEARTID | int(signal.SIGCHLD)
    place = ctypes.c_void_p(_tid_address())
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(_SYS_CLONE, ctypes.c_ulong(flags), None, None, place, None)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


# -- the child -------------------------------------------------------------------------------------


def _become(order: dict[str, Any], files: list[int]) -> NoReturn:
    """Be the process that was asked for, and end as it ends."""
    argv = order["argv"]
    try:
        _take_files(files, order["places"])
        if order["is_session"]:
            os.setsid()
        os.chdir(order["cwd"])
        _take_environment(argv, order["environment"])
        if argv[1] == "-c":
            _serve_ourselves()
        if order["bind"]:
            _end_with_parent(order["bind"])
            if os.getppid() != order["parent"]:
                os._exit(1)
        gc.enable()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.argv = [argv[1], *argv[3:]]
    main = (lambda: _run_code(argv[2])) if argv[1] == "-c" else (lambda: _run_module(argv[2]))
    code = _exit_code_of(main)
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _take_files(files: Sequence[int], places: Sequence[int]) -> None:
    import fcntl

    first = max(*places, *files) + 1
    apart = [fcntl.fcntl(fd, fcntl.F_DUPFD, first) for fd in files]
    for fd, place in zip(apart, places, strict=True):
        os.dup2(fd, place)
    kept = set(places)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))


def _take_environment(argv: Sequence[str], environment: dict[str, str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"python", 0, 0, 0)
    os.environ.clear()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    shown = [f"{name}={value}" for name, value in environment.items()]
    shown.sort(key=lambda each: not each.startswith("BATON"))  # first what tests look for
    for texts, begin, end in ((argv, arg_start, arg_end), (shown, env_start, env_end)):
        text = b"".join(os.fsencode(each) + b"\0" for each in texts)
        size = end - begin
        ctypes.memmove(begin, text[: size - 1].ljust(size, b"\0"), size)
    os.environ.update(environment)


def _serve_ourselves() -> None:
    """Have a server of our own, forked while we have one thread: of our engines, or gateways."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _end_with_parent(signal.SIGKILL)
        null = os.open(os.devnull, os.O_RDWR)
        for place in range(3):
            os.dup2(null, place)
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, theirs.fileno()):
                with suppress(OSError):
                    os.close(int(name))
        _serve(theirs)
    theirs.close()
    _use(_Link(ours, os.environ))
    asyncio.create_subprocess_exec = _create_subprocess_exec  # type: ignore[assignment]


def _end_with_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _run_code(code: str) -> None:
    module = sys.modules["__main__"]
    exec(compile(code, "<string>", "exec"), module.__dict__)


def _run_module(name: str) -> None:
    sys.modules.pop(name, None)  # imported by the server; now it is the main module
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _exit_code_of(main: Callable[[], None]) -> int:
    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


# -- asyncio, where its loop is uvloop, which starts processes without `subprocess` ----------------


class _Process:
    """What the product uses of asyncio.subprocess.Process."""

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


async def _create_subprocess_exec(*command: Any, limit: int = 2**16, **how: Any) -> Any:
    is_ours = _program([os.fsdecode(each) for each in command]) is not None
    environment = how.get("env") or os.environ
    if not is_ours or _server is None or not _server.can_start(environment):
        return await _real_create(*command, limit=limit, **how)
    process = subprocess.Popen(command, **how)
    stdout = None
    if process.stdout is not None:
        stdout = asyncio.StreamReader(limit=limit)
        protocol = asyncio.StreamReaderProtocol(stdout)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, process.stdout)
    return _Process(process, stdout)
