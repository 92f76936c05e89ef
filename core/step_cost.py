"""The time that a step of an engine takes, as a function of its work. No engine, no clock.

    seconds = base + products(rows) + attention * pairs + context * keys
            + (mixed + mixed attention * pairs, of prompts and decodes in one step)

    rows    prompt tokens and decodes, the rows of the GEMMs: piecewise linear between KNOTS, never
            falling. Weights are read once, whatever the rows, until arithmetic takes longer; in a
            mixture of experts, the first rows add experts until all are read
    pairs   (query, key) pairs of prompt tokens
    keys    read by decodes: the sum of their context lengths
    mixed   prefill and decode attention in one step, which slow each other down

Engines fit the coefficients (engine/scheduling/costs/step_cost_estimator.py), plan steps with them,
and send them with heartbeats; gateways estimate from them how long a request would take on each
engine. For a pipeline it is the time of one stage: the time that a single request waits for the
other stages is not included.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul

from .step_shape import StepShape

KNOTS = (0, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # rows
_WIDTHS = tuple(end - begin for begin, end in pairwise(KNOTS))
LEAST_PROMPT_TOKENS = 16  # in a step with decodes, so that prompts make progress


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients in seconds; none is negative. `row_s[i]`: per row from KNOTS[i] to the next
    knot.

    `max_rows`: the most rows of a measured step; an estimate for twice as many or more is a guess.
    """

    base_s: float
    row_s: tuple[float, ...]
    pair_s: float = 0.0
    key_s: float = 0.0
    max_rows: int = 0
    mixed_s: float = 0.0
    mixed_pair_s: float = 0.0
    _to_knot_s: tuple[float, ...] = field(init=False, repr=False, compare=False)  # base + rows

    def __post_init__(self) -> None:
        pieces_s = map(mul, self.row_s, _WIDTHS)
        object.__setattr__(self, "_to_knot_s", (*accumulate(pieces_s, initial=self.base_s),))

    def seconds(self, shape: StepShape) -> float:
        """How long a step of this shape takes."""
        rows = shape.num_rows
        piece = bisect_right(KNOTS, rows) - 1
        rows_s = self._to_knot_s[piece] + self.row_s[piece] * (rows - KNOTS[piece])
        if shape.num_prompt_tokens and shape.num_decodes:
            rows_s += self.mixed_s + self.mixed_pair_s * shape.pairs
        return rows_s + self.pair_s * shape.pairs + self.key_s * shape.keys

    def prompt_tokens_within(
        self, seconds: float, beside: StepShape, context: int, most: int
    ) -> int:
        """How many tokens of a prompt, after `context` computed ones, fit into a step with `beside`
        that takes no longer than `seconds`; 0 to `most`."""

        def takes_s(num_tokens: int) -> float:
            return self.seconds(beside.with_prompt(num_tokens, context))

        if takes_s(most) <= seconds:
            return most
        return bisect_right(range(1, most), seconds, key=takes_s)
