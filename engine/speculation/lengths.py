"""The number of drafts with the most accepted tokens per second. Pure: no engine, no clock.

    goodput(drafts) = (sequences + sum of their drafts' chances) / (drafting + seconds of the step)

After "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (Liu et al.
2024, SmartSpec), with a length for each sequence: the chances of a sequence's drafts never rise, so
the best n drafts of a step are the n likeliest of all, and only n must be found. If drafts take
steps of a draft model, as many as the longest sequence has, n is found for each longest length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.step_cost import KNOTS, StepCost
from ...core.step_shape import StepShape


class Lengths(NamedTuple):
    """`num_drafts` by sequence; `gain`: the factor on the tokens per second of a step without
    drafts, below 1 if no drafts pay, as drafting takes time; `extra_s`: the added step time."""

    num_drafts: list[int]
    gain: float
    extra_s: float


def best_lengths(
    chances: NDArray[np.float64],
    beside: StepShape,
    cost: StepCost,
    wait_s: float,
    most: int,
    draft_s: float = 0.0,
) -> Lengths:
    """The best lengths, at most `most` drafts in all. `chances[i, j]`: the probability that draft j
    of sequence i and all before it are accepted. `beside`: the step without drafts, with at least
    one decode for each sequence. `wait_s`: the time that drafts delay the step, plus `draft_s` for
    each draft of the longest sequence."""
    owners, places = np.nonzero(chances)
    flat = chances[owners, places]
    order = np.argsort(-flat, kind="stable")
    step_s = _seconds(cost, beside, min(most, len(order)))
    plain = beside.num_decodes / max(step_s[0], 1e-12)
    best, kept, extra_s = beside.num_decodes / (step_s[0] + wait_s), order[:0], wait_s
    for longest in range(1, chances.shape[1] + 1) if draft_s else (chances.shape[1],):
        likeliest = (order[places[order] < longest] if draft_s else order)[:most]
        if not len(likeliest):
            break
        tokens = beside.num_decodes + np.cumsum(flat[likeliest])
        seconds = step_s[1 : len(likeliest) + 1] + (wait_s + longest * draft_s)
        goodput = tokens / seconds
        chosen = int(goodput.argmax())
        if goodput[chosen] > best:
            best, kept = goodput[chosen], likeliest[: chosen + 1]
            extra_s = seconds[chosen] - step_s[0]
    counts = np.bincount(owners[kept], minlength=len(chances))
    return Lengths(counts.tolist(), float(best / plain), float(extra_s))


def _seconds(cost: StepCost, beside: StepShape, most: int) -> NDArray[np.float64]:
    """Seconds of steps with 0 to `most` drafts: a draft is a row, keys are read once a sequence."""
    rows = beside.num_rows + np.arange(most + 1)
    of_piece = np.clip(rows - np.array(KNOTS)[:, None], 0, np.diff(KNOTS, append=np.inf)[:, None])
    rows_s = np.array(cost.row_s) @ of_piece
    return np.asarray(cost.seconds(beside) + (rows_s - rows_s[0]), np.float64)
