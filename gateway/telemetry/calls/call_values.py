"""The figures of one call that is over: values, no sums. call_figures.py works them out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """One hand-off. `seconds` from the first reserved block to the last pulled one."""

    source: str
    puller: str
    transport: str
    num_bytes: int
    seconds: float
    puller_cached_tokens: int


@dataclass(frozen=True, slots=True)
class CallFigures:
    """`outcome`: "stop" or "length" of the first sample, or the error's code.

    `ttft_s` is of the sample that was first, `last_ttft_s` of the one that was last; `tpot_s` one
    value a sample. `stages` and `transfer` are of the first sample: its prefill serves all.
    """

    outcome: str
    is_finished: bool
    is_cancelled: bool
    ttft_s: float | None
    last_ttft_s: float | None
    max_gap_s: float
    tpot_s: tuple[float, ...]
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    attempts: int
    stages: dict[str, float]
    transfer: TransferFigures | None

    def meets(self, *, ttft_slo_s: float, tbt_slo_s: float) -> bool:
        """Whether the call finished with every sample's TTFT and gaps within the targets."""
        return (
            self.is_finished
            and self.last_ttft_s is not None
            and self.last_ttft_s <= ttft_slo_s
            and self.max_gap_s <= tbt_slo_s
        )
