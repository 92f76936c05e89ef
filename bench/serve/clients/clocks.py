"""What the GPUs' clocks, power and temperature were while something was measured.

A card's clock falls by some per cent as it warms up or meets its power limit: two figures of it are
comparable as far as these are.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

_FIELDS = {"clock_mhz": "clocks.sm", "power_w": "power.draw", "temperature_c": "temperature.gpu"}
_EVERY_MS = 250
_LAST_WORD_S = 5.0

Clocks = dict[str, dict[str, float]]


@contextmanager
def recorded(into: Clocks) -> Iterator[None]:
    """Adds the medians of each GPU, by its index; nothing where there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield
        return
    query = ",".join(["index", *_FIELDS.values()])
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([*command, "-lms", str(_EVERY_MS)], stdout=said)
        try:
            yield
        finally:
            process.terminate()
            process.wait(_LAST_WORD_S)
            said.seek(0)
            into.update(medians(said.read().splitlines()))


def medians(lines: list[str]) -> Clocks:
    """Of lines `index, clock, power, temperature`; others, and what a card does not tell, are
    passed over."""
    samples: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        index, *values = [cell.strip() for cell in line.split(",")]
        if len(values) != len(_FIELDS):
            continue  # the last line, cut off
        for name, value in zip(_FIELDS, values, strict=True):
            try:
                number = float(value)
            except ValueError:
                continue
            samples.setdefault(index, {}).setdefault(name, []).append(number)
    return {
        index: {name: median(numbers) for name, numbers in of_gpu.items()}
        for index, of_gpu in samples.items()
    }
