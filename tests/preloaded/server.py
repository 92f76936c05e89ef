"""The fork server and its children: see starts.py."""

from __future__ import annotations

import array
import asyncio
import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from . import starts
from .starts import HEAD, SERVER_NAME, read, tid_address

_IMPORTED = (
    *("torch", "uvloop", "tokenizers", "baton.prefill_node.engine_main"),
    *("baton.decode_node.engine_main", "baton.node.supervisor.supervisor"),
    *("baton.gateway.process.server", "baton.cli.deployment.gateways"),
    *("baton.engine.parallel.rank_worker", "baton.offline.llm"),
)
_CLONE_PARENT, _CHILD_CLEARTID, _CHILD_SETTID = 0x8000, 0x00200000, 0x01000000
_SYS_CLONE = 56  # x86-64
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def be_first_server() -> NoReturn:
    """Become the process that imports the product."""
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
    """Fork requested processes, as children of our parent, until the parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, SERVER_NAME.encode(), 0, 0, 0)
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
    head, files, _, _ = socket.recv_fds(connection, HEAD.size, 64)
    if not head:
        raise EOFError
    head += read(connection, HEAD.size - len(head))
    size, num_files = HEAD.unpack(head)
    order: dict[str, Any] = json.loads(read(connection, size))
    assert len(files) == num_files
    return order, list(array.array("i", files))


def _clone_beside() -> int:
    """os.fork(), but the child's parent is our parent."""
    libc, python = ctypes.PyDLL(None), ctypes.pythonapi
    flags = _CLONE_PARENT | _CHILD_SETTID | _CHILD_CLEARTID | int(signal.SIGCHLD)
    place = ctypes.c_void_p(tid_address())
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(_SYS_CLONE, ctypes.c_ulong(flags), None, None, place, None)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


# -- the child -------------------------------------------------------------------------------------


def _become(order: dict[str, Any], files: list[int]) -> NoReturn:
    """Become the requested process, and end as it ends."""
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
        if "BATON_CALL_TRACE" in os.environ:  # normally imported at an interpreter's start
            importlib.import_module("call_trace.sitecustomize")
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
    shown.sort(key=lambda each: not each.startswith("BATON"))  # first the variables that tests read
    for texts, begin, end in ((argv, arg_start, arg_end), (shown, env_start, env_end)):
        text = b"".join(os.fsencode(each) + b"\0" for each in texts)
        size = end - begin
        ctypes.memmove(begin, text[: size - 1].ljust(size, b"\0"), size)
    os.environ.update(environment)


def _serve_ourselves() -> None:
    """Fork a server of our own while we have one thread: for our engines, or gateways."""
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
    starts.use(starts.Link(ours, os.environ))
    asyncio.create_subprocess_exec = starts.create_subprocess_exec  # type: ignore[assignment]


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
