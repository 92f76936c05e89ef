"""Clocks, power and temperature of the GPUs during a measurement.

A card's clock falls by some per cent as it warms up or meets its power limit: two figures of it are
comparable only as far as these values are.
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
    """Add the medians of each GPU, by its index; nothing without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield
        return
    query = ",".join(["index", *_FIELDS.values()])
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([*command, "-lms", str(_EVERY_MS)], stdout=output)
        try:
            yield
        finally:
            process.terminate()
            process.wait(_LAST_WORD_S)
            output.seek(0)
            into.update(medians(output.read().splitlines()))


def medians(lines: list[str]) -> Clocks:
    """The medians from lines `index, clock, power, temperature`; skips other lines and missing
    values."""
    samples: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        index, *values = [cell.strip() for cell in line.split(",")]
        if len(values) != len(_FIELDS):
            continue  # the last line may be cut off
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
