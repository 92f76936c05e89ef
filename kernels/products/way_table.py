"""The fastest measured kernels of products with quantised weights, by shape: ways.json.

`python -m baton.bench.kernels.quantised_products` writes it for the shapes of some models; other
shapes take the nearest entry. Knows no kernel itself.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("ways.json")


@dataclass(frozen=True, slots=True)
class Measured:
    """The fastest configuration of one kind of kernel for a product."""

    weight: str  # "row" or "block" (FP8), or "int4"
    rows: int
    outputs: int
    inputs: int
    kind: str
    way: dict[str, Any]  # fields of the class that `kind` names in WAYS
    us: float


@functools.cache
def measured() -> tuple[Measured, ...]:
    """The table; empty if its file is missing."""
    if not TABLE.is_file():
        return ()
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text())
    return tuple(Measured(**row) for row in rows)


@functools.cache
def look_up(
    weight: str, num_rows: int, num_outputs: int, num_inputs: int, kinds: tuple[str, ...]
) -> Measured | None:
    """The fastest entry of these kinds for the nearest shape, with at least `num_rows` rows, or
    the most rows measured; None if no such kind was measured."""
    found = [one for one in measured() if one.weight == weight and one.kind in kinds]
    sizes = sorted({one.rows for one in found})
    at = next((size for size in sizes if size >= num_rows), sizes[-1] if sizes else 0)
    found = [one for one in found if one.rows == at]

    def distance(one: Measured) -> float:
        return abs(math.log(one.outputs / num_outputs)) + abs(math.log(one.inputs / num_inputs))

    return min(found, key=lambda one: (round(distance(one), 6), one.us)) if found else None
