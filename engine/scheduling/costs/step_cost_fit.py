"""Fits the cost of steps (core/step_cost.py) to measured ones: least squares of the relative error,
with no part negative."""

from __future__ import annotations

import numpy as np

from ....core.step_cost import KNOTS, StepCost
from ....core.step_shape import StepShape

_FLATTER_AFTER = KNOTS[1:7]  # rows that use all experts of a mixture
_STEEPER_AFTER = (0, *KNOTS[5:])  # rows whose arithmetic takes longer than reading the weights
# Regularization of base, row, bends, pairs, keys, mixed steps and their pairs: between measured
# sizes the line is straight, and pairs do not take the place of bends.
_BENDS = [1e-3] * (len(_STEEPER_AFTER) - 1 + len(_FLATTER_AFTER))
_WEIGHTS = np.array([0.0, 0.0, *_BENDS, 1e-2, 0.0, 1e-3, 1e-1])
_REACH = 1.25  # rows over a knot that its slope needs: fewer rows give noise
_CONVERGED = 1e-9


def fit_step_cost(points: list[tuple[StepShape, float]]) -> StepCost | None:
    """Fit steps and their seconds, all above 0; None unless one has twice the rows of another."""
    rows = [shape.num_rows for shape, _ in points]
    if not points or max(rows) < 2 * min(rows):
        return None
    seconds = np.array([seconds for _, seconds in points])
    features = _features([shape for shape, _ in points])
    base_s, *of_rows, pair_s, key_s, mixed_s, mixed_pair_s = _non_negative_least_squares(
        features / seconds[:, None], _WEIGHTS
    )
    steeper = list(zip(_STEEPER_AFTER, of_rows, strict=False))
    flatter = list(zip(_FLATTER_AFTER, of_rows[len(steeper) :], strict=True))

    def slope_behind(knot: int) -> float:
        more = sum(part for begin, part in steeper if begin <= knot)
        return more + sum(part for end, part in flatter if knot < end)

    row_s = tuple(map(slope_behind, KNOTS))
    return StepCost(base_s, row_s, pair_s, key_s, max(rows), mixed_s, mixed_pair_s)


def _features(shapes: list[StepShape]) -> np.ndarray:
    """[shapes, parts]: the base, rows beyond each of _STEEPER_AFTER that some shape exceeds enough,
    rows up to each of _FLATTER_AFTER, pairs, keys, whether it is mixed, and then its pairs."""
    rows, pairs, keys = np.array(
        [(shape.num_rows, shape.pairs, shape.keys) for shape in shapes], float
    ).T
    is_reached = rows.max() >= _REACH * np.array(_STEEPER_AFTER)
    behind = np.maximum(0.0, rows[:, None] - _STEEPER_AFTER) * is_reached
    until = np.minimum(rows[:, None], _FLATTER_AFTER)
    is_mixed = np.array(
        [shape.num_prompt_tokens > 0 < shape.num_decodes for shape in shapes], float
    )
    mixed = (is_mixed, is_mixed * pairs)
    return np.column_stack([np.ones_like(rows), behind, until, pairs, keys, *mixed])


def _non_negative_least_squares(features: np.ndarray, weights: np.ndarray) -> list[float]:
    """argmin over x >= 0 of |features @ x - 1|^2 + weights @ x^2, features scaled to be 1 at most;
    by active sets (Lawson and Hanson 1974)."""
    scale = np.maximum(features.max(axis=0), np.finfo(float).tiny)
    scaled = features / scale
    gram, product = scaled.T @ scaled, scaled.sum(axis=0)
    gram[np.diag_indices_from(gram)] += weights
    found = np.zeros(len(product))
    is_free = np.zeros(len(product), bool)
    for _ in range(3 * len(product)):
        slopes = np.where(is_free, -np.inf, product - gram @ found)
        if slopes.max() <= _CONVERGED:
            break
        is_free[slopes.argmax()] = True
        while True:
            free = np.flatnonzero(is_free)
            best = np.linalg.lstsq(gram[np.ix_(free, free)], product[free], rcond=None)[0]
            if (best > 0).all():
                break
            # Go towards it as far as all stay non-negative; those that reach 0 are fixed.
            falling = best <= 0
            now = found[free]
            share = (now[falling] / (now - best)[falling]).min()
            found[free] = now + share * (best - now)
            is_free[free[found[free] <= _CONVERGED]] = False
            if not is_free.any():
                return [0.0] * len(product)
        found[:] = 0.0
        found[free] = best
    return [float(value) for value in found / scale]
