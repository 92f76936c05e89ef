"""Shared by all tests: puts this folder on the path, so that tests can import `fakes`.

pytest compiles the asserts of test modules into conditions that hold under `python -O` too; here it
is configured to do the same for the modules that they share, before any is imported.

Without a GPU the Triton kernels run in Triton's interpreter, which is chosen at its first import:
here, before any test module can import it.

Several processes run the tests, each test in one of them, so torch has one thread in each, as in
the engines that tests start. Compiled code is cached: tests start hundreds of processes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch

sys.dont_write_bytecode = False

# A shell makes its background jobs ignore Ctrl-C, and child processes inherit that; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
# Tests that use its session-wide fixture.
SHARE_THE_DEMO = (
    *("e2e/test_http.py", "e2e/test_offline.py", "e2e/test_structured.py", "e2e/test_tokens.py"),
)
MANY_OBJECTS = 200_000  # a third of a process's objects after importing all tests
STARTS_PROCESSES = {"integration", "e2e", "bad_input", "browser", "external"}
sys.path.insert(0, str(HERE))
pytest.register_assert_rewrite(
    *{path.name for path in HERE.iterdir() if path.is_dir()},
    *{
        path.stem
        for path in HERE.rglob("*.py")
        if not path.stem.startswith(("test_", "conftest", "sitecustomize"))
    },
)


def pytest_configure() -> None:
    """Runs before Hypothesis selects its profile."""
    from effort import register_profiles

    register_profiles()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all tests of a file in one process, as well as files that share a deployment."""
    from xdist.scheduler import LoadFileScheduling

    class ByDeployment(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = str(super()._split_scope(nodeid))
            return "the demo's" if path.endswith(SHARE_THE_DEMO) else path

    return ByDeployment(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fault sweep")
    group.addoption("--fault-streams", type=int, default=1000, help="streams that it runs")
    group.addoption("--fault-seed", type=int, default=1, help="of what is broken, and when")
    group.addoption("--fault-out", type=Path, help="write its figures to this file")
    group = parser.getgroup("bad input")
    group.addoption("--bad-input-requests", type=int, default=1_000_000, help="mutated requests")
    group.addoption("--bad-input-seed", type=int, default=1, help="of how they are mutated")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Prepare the start of the product's processes: in the main thread, before any fixture."""
    if item.path.relative_to(HERE).parts[0] in STARTS_PROCESSES:
        from preloaded import starts

        starts.start()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exclude loaded objects from garbage collection again, if a test of this file undid that.

    Counting the excluded objects would mean walking them all.
    """
    is_last = nextitem is None or nextitem.path != item.path
    if is_last and len(gc.get_objects(generation=2)) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Exclude imported objects from garbage collection: walking them takes time, and would pause
    tests that measure time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        # Six times a test, pytest adds a handler to each logger that does not propagate; torch has
        # dozens.
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError):
        import triton_interpreter

        triton_interpreter.prepare()
