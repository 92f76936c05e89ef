"""`make bench`: all figures that a CPU can measure, printed and written to bench/results/cpu.json.

python -m baton.bench.cpu [family ...]     all of them without arguments
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from . import front
from .cpu_families import (
    request_end,
    routing,
    scheduling,
    shm_pull,
    small_model,
    structured,
    telemetry,
    whole_system,
)
from .floors.figures import ROOT, Figure, machine, table, write

FAMILIES: dict[str, Callable[[], list[Figure]]] = {
    "scheduling": scheduling.measure,
    "request end": request_end.measure,
    "routing": routing.measure,
    "shm": shm_pull.measure,
    "model": small_model.measure,
    "gateway": front.throughput,
    "structured": structured.measure,
    "telemetry": telemetry.measure,
    "system": whole_system.measure,
}


def main(wanted: Sequence[str]) -> int:
    """Measure one family after the other; the results are written only if all families ran."""
    if unknown := set(wanted) - set(FAMILIES):
        print(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
        return 2
    where = machine()
    print(f"{where['cpu']}, {where['cores']} cores, load {where['load_before']:.2f}\n")
    measured: dict[str, Sequence[Figure]] = {}
    for family in wanted or FAMILIES:
        began_s = time.monotonic()
        measured[family] = FAMILIES[family]()
        print(
            f"{family} ({time.monotonic() - began_s:.0f} s)\n{table(measured[family])}\n",
            flush=True,
        )
    if not wanted:
        path = ROOT / "bench" / "results" / "cpu.json"
        write(path, measured, where)
        print(f"written to {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
