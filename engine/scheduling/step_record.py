"""What an engine's steps had in them, how long those with decodes were, and how many of these kept
what was promised. Knows no clock."""

from __future__ import annotations

from collections import deque

from ...core.step_cost import StepShape

_NUM_STEPS = 512  # that the percentile is of


class StepRecord:
    """One engine's, since it was made."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_decode_tokens = 0
        self.num_promised_steps = 0
        self.num_kept_steps = 0
        self._last_s: deque[float] = deque(maxlen=_NUM_STEPS)

    def observe(self, shape: StepShape, seconds: float, promise_s: float | None) -> None:
        """A step took so long; `promise_s`: what its decodes, if it had any, were promised."""
        self.num_prompt_tokens += shape.num_prompt_tokens
        if not shape.num_decodes:
            return
        self.num_decode_tokens += shape.num_decodes
        self._last_s.append(seconds)
        if promise_s is not None:
            self.num_promised_steps += 1
            self.num_kept_steps += seconds <= promise_s

    @property
    def p99_s(self) -> float | None:
        """Of the last steps with decodes, nearest rank; None: there were none."""
        if not self._last_s:
            return None
        ordered = sorted(self._last_s)
        return ordered[(99 * len(ordered) - 1) // 100]
