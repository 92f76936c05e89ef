"""A workload on a system, by several generator processes that share one clock and one start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from baton.core.process.children import bound_to_us
from baton.loadgen.records import Record

from .clients.arrivals import deal
from .clients.record_files import load, merge
from .clients.worker import WorkerPlan
from .clients.workloads import Workload

_START_IN_S = 1.0  # time to draw prompts
_DRAWN_TOKENS_PER_S = 2e6
_LAST_WORD_S = 60.0


def apply(
    workload: Workload,
    target: str,
    *,
    vocab_size: int,
    model: str = "",
    num_generators: int = 1,
    drain_s: float = 10.0,
    fields: Mapping[str, Any] | None = None,
) -> list[Record]:
    """Run the workload to its end; returns the records of all requests, by due time. `fields`:
    additional fields of each request's body, over HTTP.

    Raises RuntimeError if a generator fails: a partial load is not a valid result.
    """
    hands = deal(workload.arrivals, num_generators)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-load-")))
        plans = [
            WorkerPlan(
                target,
                model,
                vocab_size,
                index,
                num_generators,
                workload.duration_s,
                drain_s,
                tuple(hand),
                workload.background,
                str(folder / f"{index}.npz"),
                fields or {},
            )
            for index, hand in enumerate(hands)
        ]
        workers = [stack.enter_context(_Worker(plan)) for plan in plans]
        for worker in workers:
            worker.expect("connected")
        num_drawn = max(sum(a.prompt.num_tokens for a in hand) for hand in hands)
        start_s = time.monotonic() + _START_IN_S + num_drawn / _DRAWN_TOKENS_PER_S
        for worker in workers:
            worker.tell(repr(start_s))
        for worker in workers:
            worker.expect("done")
        return merge(load(Path(plan.out)) for plan in plans)


class _Worker:
    """A child process that ends with its parent."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan

    def __enter__(self) -> _Worker:
        self._process = subprocess.Popen(
            bound_to_us([sys.executable, "-m", "baton.bench.serve.clients.worker"], signal.SIGKILL),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )
        self.tell(self._plan.to_json())
        return self

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def expect(self, word: str) -> None:
        assert self._process.stdout is not None
        output = self._process.stdout.readline().strip()
        if output != word:
            raise RuntimeError(f"a load generator said {output!r}, not {word!r}; see its traceback")

    def __exit__(self, kind: object, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        if kind is not None:
            self._process.kill()
        self._process.stdin.close()
        self._process.wait(_LAST_WORD_S)
        self._process.stdout.close()
