"""Runs requests on one engine until they end."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.request.request import Request
from baton.engine.local import LocalEngine


def outputs_of(engine: LocalEngine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Output token ids by request key, as `LocalEngine.generating` returns them."""
    outputs: dict[str, list[int]] = {}
    for _ in engine.generating(requests, outputs):
        pass
    return outputs
