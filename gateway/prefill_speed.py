"""How fast a prefill engine computes prompts, and how much is ahead of a new one: seen from here.

    dispatched: so much was ahead + its own tokens ──────── first token: all of them are computed
                                     └── tokens ÷ time = one sample of the speed
Recent samples count more. What other gateways send counts by the engine's heartbeats.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_DECAY = 0.9  # of all earlier samples, at each new one


@dataclass(slots=True)
class PrefillSpeed:
    """One engine's. Times are monotonic seconds; a key names one dispatch."""

    _tokens: float = 0.0
    _seconds: float = 0.0
    _begun: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float | None:
        """None while nothing was measured."""
        return self._tokens / self._seconds if self._seconds else None

    def began(self, key: tuple[str, int], num_tokens: int, now_s: float) -> None:
        """A dispatch, with which so many tokens are to be computed, those ahead of it included."""
        self._begun[key] = (now_s, num_tokens)

    def ended(self, key: tuple[str, int], now_s: float) -> None:
        """Its first token is here."""
        began_s, num_tokens = self._begun.pop(key, (now_s, 0))
        if now_s > began_s:
            self._tokens = _DECAY * self._tokens + num_tokens
            self._seconds = _DECAY * self._seconds + now_s - began_s

    def forget(self, key: tuple[str, int]) -> None:
        """It ended without a first token: no sample."""
        self._begun.pop(key, None)
