"""How many drafts pay: the most accepted tokens per second. Pure: no engine, no clock.

    goodput(drafts) = (sequences + sum of their drafts' chances) / seconds of the step

After "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (Liu et al.
2024, SmartSpec), with a length for each sequence: a draft's chance never rises along a sequence, so
the best n drafts of a step are the n likeliest of all, and only n is to be found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.step_cost import KNOTS, StepCost, StepShape


class Lengths(NamedTuple):
    """Drafts by sequence; by which factor they raise the tokens per second of a step without, below
    1 where none pay, since to ask for drafts takes time; how much longer the step takes."""

    num_drafts: list[int]
    gain: float
    extra_s: float


def best_lengths(
    chances: NDArray[np.float64],
    beside: StepShape,
    cost: StepCost,
    wait_s: float,
    most: int,
) -> Lengths:
    """`chances[i, j]`: that draft j of sequence i is accepted, with all before it. `beside`: the
    step without drafts, of one decode for each sequence at least. `wait_s`: what it takes to have
    drafts, which a step without saves. No more than `most` drafts in all."""
    owners, places = np.nonzero(chances)
    flat = chances[owners, places]
    order = np.argsort(-flat, kind="stable")[:most]
    tokens = beside.num_decodes + np.concatenate([[0.0], np.cumsum(flat[order])])
    seconds = _seconds(cost, beside, len(order)) + wait_s
    goodput = tokens / seconds
    chosen = int(goodput.argmax())
    plain = beside.num_decodes / max(seconds[0] - wait_s, 1e-12)
    counts = np.bincount(owners[order[:chosen]], minlength=len(chances))
    extra_s = float(seconds[chosen] - seconds[0] + wait_s)
    return Lengths(counts.tolist(), float(goodput[chosen] / plain), extra_s)


def _seconds(cost: StepCost, beside: StepShape, most: int) -> NDArray[np.float64]:
    """Of steps with 0 to `most` drafts: each is a row, and its sequence's keys are read once."""
    rows = beside.num_rows + np.arange(most + 1)
    slopes = np.asarray(cost.row_s)
    products = slopes @ np.maximum(0, rows - np.asarray(KNOTS)[:, None])
    fixed = cost.base_s + cost.pair_s * beside.pairs + cost.key_s * beside.keys
    return np.asarray(fixed + products, np.float64)
