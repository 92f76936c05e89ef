"""Console scripts: those named in pyproject.toml exist, and an interrupt ends them quietly."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from baton import __main__ as scripts
from baton.cli.main import build_parser
from baton.core.version import version

SCRIPTS: dict[str, str] = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())[
    "project"
]["scripts"]


@pytest.fixture(autouse=True)
def unraisable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # restored after each test


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_interrupt_while_it_is_imported_is_no_traceback(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = SCRIPTS[script].partition(":")
    run = getattr(import_module(module), name)

    def interrupted(*_: str) -> NoReturn:
        raise KeyboardInterrupt

    def interrupted_in_a_class(*_: str) -> NoReturn:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    for how in (interrupted, interrupted_in_a_class):
        monkeypatch.setattr(f"{module}.import_module", how)
        assert run() == 130


_INTERRUPTED = """
import signal, sys, time, types, weakref
from baton import __main__ as scripts

class Lock: ...

def imports():
    lock = Lock()
    kept = weakref.ref(lock, lambda _: signal.raise_signal(signal.SIGINT))
    del lock
    time.sleep(20)

sys.modules["baton.played"] = types.SimpleNamespace(imports=imports)
sys.exit(scripts._call(".played", "imports"))
"""


def test_an_interrupt_in_a_callback_is_not_lost() -> None:
    """Python drops exceptions raised in callbacks, such as those of import locks."""
    command = [sys.executable, "-c", _INTERRUPTED]
    ended = subprocess.run(command, timeout=15, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_it_runs_exists(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _, name = SCRIPTS[script].partition(":")
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit, match="0"):
        getattr(import_module(module), name)()
    assert f"usage: {script}" in capsys.readouterr().out


_CUT_OFF = """
import sys, types
from baton import __main__ as scripts

def prints():
    for _ in range(1000):
        print("a line " * 20, flush={flush})
    return 0

sys.modules["baton.played"] = types.SimpleNamespace(prints=prints)
sys.exit(scripts._call(".played", "prints"))
"""


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"baton {version()}\n"


@pytest.mark.parametrize("flush", [True, False])
def test_a_reader_that_has_enough_is_no_traceback(flush: bool) -> None:
    """`baton doctor | head -1` ends without a traceback."""
    command = [sys.executable, "-c", _CUT_OFF.format(flush=flush)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ended:
        assert ended.stdout is not None and ended.stderr is not None
        ended.stdout.readline()
        ended.stdout.close()
        assert ended.stderr.read() == b""
    assert ended.returncode == 141


def test_a_broken_pipe_of_another_kind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> NoReturn:
        raise BrokenPipeError("a socket's")

    monkeypatch.setattr(scripts, "import_module", lambda *_: SimpleNamespace(run=broken))
    with pytest.raises(BrokenPipeError):
        scripts._call(".played", "run")
