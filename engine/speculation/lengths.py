"""How many drafts pay: the most accepted tokens per second. Pure: no engine, no clock.

    goodput(drafts) = (sequences + sum of their drafts' chances) / (drafting + seconds of the step)

After "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (Liu et al.
2024, SmartSpec), with a length for each sequence: a draft's chance never rises along a sequence, so
the best n drafts of a step are the n likeliest of all, and only n is to be found. Where each draft
of the longest takes a step of a draft model, for each longest length.
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
    draft_s: float = 0.0,
) -> Lengths:
    """`chances[i, j]`: that draft j of sequence i is accepted, with all before it. `beside`: the
    step without drafts, of one decode for each sequence at least. `wait_s`: what it takes to have
    drafts, which a step without saves, and `draft_s` for each of the longest. No more than `most`
    drafts in all."""
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
    """Of steps with 0 to `most` drafts: each is a row, and its sequence's keys are read once."""
    rows = beside.num_rows + np.arange(most + 1)
    of_piece = np.clip(rows - np.array(KNOTS)[:, None], 0, np.diff(KNOTS, append=np.inf)[:, None])
    rows_s = np.array(cost.row_s) @ of_piece
    return np.asarray(cost.seconds(beside) + (rows_s - rows_s[0]), np.float64)
