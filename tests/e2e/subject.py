"""The system under test of an end-to-end test of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from deployments import Running
from e2e.oracle import GreedyOracle

from baton.engine.local import LocalEngine


@dataclass
class Subject:
    """A system under test with its two references."""

    system: Running
    oracle: GreedyOracle
    local: LocalEngine
    vocab_size: int
    num_decode_nodes: int
