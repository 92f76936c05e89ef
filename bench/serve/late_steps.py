"""Host activity during steps that took longer than expected, in any command that runs engines.

python -m baton.bench.serve.late_steps FOLDER [--every-step] COMMAND...

As `... late_steps /tmp/late python -m baton.bench.goodput --shape llama-3.1-8b --gpus 0 ...`. Each
engine's process samples its engine's thread every 2 ms and writes FOLDER/PID.txt: for each late
step its shape, and the code positions sampled during it, with times. A thread releases the GIL
inside torch's functions, so these are sampled more often than their share of the time.

Sampling slows the engine down. With --every-step there is none: FOLDER/PID.csv has a line for each
step, late or not. `took_ms` is from its beginning on the device until the host saw its end;
`launching_ms` is the host's time to plan and launch it, during which the previous step may have
ended unseen (`previous_ended`).
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TextIO

_LOOK_S = 0.002
_LATE_FACTOR, _LATE_S = 1.3, 0.004  # late: longer than expected by both together
_DEPTH, _MOST_LINES, _MOST_LOOKS = 5, 60, 4000
_ENGINE = "baton.engine.engine"
_EVERY = "--every-step"
_COLUMNS = (
    *("end_s", "prompt_tokens", "decodes", "keys", "took_ms", "expected_ms", "promise_ms"),
    *("launching_ms", "previous_ended", "running", "waiting"),
)

Look = tuple[float, str]  # when, and where the thread was


def where(frame: FrameType | None) -> str:
    """The innermost functions of a thread."""
    parts: list[str] = []
    while frame is not None and len(parts) < _DEPTH:
        code = frame.f_code
        parts.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno}:{code.co_name}")
        frame = frame.f_back
    return " < ".join(parts)


def is_late(took_s: float, expected_s: float | None) -> bool:
    """Whether a step is reported as late."""
    return expected_s is not None and took_s > expected_s * _LATE_FACTOR + _LATE_S


def runs(looks: Iterable[Look], begin_s: float) -> list[str]:
    """A line per place: how long after `begin_s` it was first seen, and how often in a row."""
    found: list[tuple[float, str, int]] = []
    for at_s, place in looks:
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place, found[-1][2] + 1)
        else:
            found.append((at_s, place, 1))
    lines = [f"  {1e3 * (at_s - begin_s):7.1f} ms, {n} x {place}" for at_s, place, n in found]
    return lines[:_MOST_LINES]


class Watch:
    """Samples the engine's thread of one process; does nothing until the engine's first step."""

    def __init__(self, folder: Path, *, every_step: bool) -> None:
        self._folder = folder
        self._every_step = every_step
        self._steps: TextIO | None = None
        self._looks: deque[Look] = deque(maxlen=_MOST_LOOKS)
        self._thread_id: int | None = None
        self._has_hook = False
        self._is_over = threading.Event()
        self._looking = threading.Thread(target=self._run, name="late-steps", daemon=True)
        self._looking.start()

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            if not self._has_hook and hasattr(module := sys.modules.get(_ENGINE), "Engine"):
                self._hook(module)
                if self._every_step:
                    return
            if self._thread_id is not None:
                frame = sys._current_frames().get(self._thread_id)
                self._looks.append((time.monotonic(), where(frame)))

    def end(self) -> None:
        """Stop sampling."""
        self._is_over.set()
        self._looking.join()
        if self._steps is not None:
            self._steps.close()

    def _hook(self, module: ModuleType | None) -> None:
        self._has_hook = True
        engine: Any = module.Engine  # type: ignore[union-attr]
        measure: Callable[..., None] = engine._measure

        def measured(one: Any, step: Any, *more: Any) -> None:
            self._thread_id = threading.get_ident()
            expected_s, before_s = one._step_costs.expected_s(step.shape), one._ended_s
            measure(one, step, *more)
            now_s, began_s = time.monotonic(), max(step.launched_s, before_s)
            if self._every_step:
                self._note(one, step, now_s, began_s, expected_s)
            elif is_late(now_s - began_s, expected_s):
                self._tell(step, now_s, began_s, expected_s)

        engine._measure = measured

    def _note(
        self, one: Any, step: Any, now_s: float, began_s: float, expected_s: float | None
    ) -> None:
        if self._steps is None:
            self._steps = (self._folder / f"{os.getpid()}.csv").open("w", buffering=1)
            print(*_COLUMNS, sep=",", file=self._steps)
        shape, queues = step.shape, one._scheduler.queues
        times_s = (now_s - began_s, expected_s or 0.0, step.promise_s or 0.0, step.launching_s)
        print(
            *(f"{now_s:.4f}", shape.num_prompt_tokens, shape.num_decodes, shape.keys),
            *(f"{1e3 * each_s:.2f}" for each_s in times_s),
            *(int(step.previous_ended), len(queues.running), len(queues.waiting)),
            sep=",",
            file=self._steps,
        )

    def _tell(self, step: Any, now_s: float, began_s: float, expected_s: float) -> None:
        took_ms, expected_ms = 1e3 * (now_s - began_s), 1e3 * expected_s
        title = f"{took_ms:.1f} ms, expected {expected_ms:.1f}, {step.shape}"
        looks = [look for look in list(self._looks) if began_s <= look[0] <= now_s]
        with (self._folder / f"{os.getpid()}.txt").open("a") as file:
            print(title, *runs(looks, began_s), sep="\n", file=file)


def watch(folder: str, *, every_step: bool) -> None:
    """Sample in the processes that this one forks."""

    def begin() -> None:
        begun = Watch(Path(folder), every_step=every_step)
        atexit.register(begun.end)  # no sampling while the interpreter shuts down

    os.register_at_fork(after_in_child=begin)
    begin()


def main(argv: list[str]) -> int:
    """Run the command; its processes sample themselves."""
    every_step = argv[1:2] == [_EVERY]
    command = argv[1 + every_step :]
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(argv[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="baton-late-") as first_on_path:
        call = f"watch({str(folder)!r}, every_step={every_step})"
        hook = f"from {__spec__.name} import watch\n\n{call}\n"
        (Path(first_on_path) / "sitecustomize.py").write_text(hook)
        path = os.pathsep.join(filter(None, (first_on_path, os.environ.get("PYTHONPATH"))))
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
