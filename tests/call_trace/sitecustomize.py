"""Records which functions of Baton run. Imported by every Python process whose PYTHONPATH has this
folder, and by forks of preloaded/.

With BATON_CALL_TRACE=FOLDER, functions are recorded in two periods: from the creation of
FOLDER/idle to that of FOLDER/start, while no request runs, and from then to the creation of
FOLDER/stop. FOLDER/<pid>.json then has, for both periods, the files and their functions, and the
process's command line.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_LOOK_S = 0.01


class _Trace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[CodeType] | None = None

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self._seen is not None and event == "call":
            self._seen.add(frame.f_code)

    def run(self) -> None:
        self._wait_for("idle")
        self._seen = idle = set[CodeType]()
        self._wait_for("start")
        self._seen = busy = set[CodeType]()
        self._wait_for("stop")
        self._seen = None
        reported = {
            "command": Path("/proc/self/cmdline").read_bytes().decode().split("\0"),
            "idle": _by_file(idle),
            "request": _by_file(busy),
        }
        whole = self._folder / f"{os.getpid()}.part"
        whole.write_text(json.dumps(reported))
        whole.rename(whole.with_suffix(".json"))

    def _wait_for(self, name: str) -> None:
        while not (self._folder / name).exists():
            time.sleep(_LOOK_S)


def _by_file(codes: set[CodeType]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for code in list(codes):
        found.setdefault(code.co_filename, set()).add(code.co_qualname)
    return {name: sorted(functions) for name, functions in found.items()}


if folder := os.environ.get("BATON_CALL_TRACE"):
    trace = _Trace(Path(folder))
    threading.Thread(target=trace.run, daemon=True).start()
    threading.setprofile(trace.profile)
    sys.setprofile(trace.profile)
