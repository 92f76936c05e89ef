"""Which proposer `--speculative-config` asks for."""

from __future__ import annotations

from ...core.speculative_config import DRAFT_MODEL, SpeculativeConfig
from ..execution.batch import Drafter
from .draft_model import DraftModelProposer
from .ngram import NgramProposer
from .proposer import Proposer


def make_proposer(config: SpeculativeConfig | None, drafter: Drafter) -> Proposer | None:
    """None: no speculation. `drafter` is for draft models."""
    if config is None:
        return None
    if config.method == DRAFT_MODEL:
        return DraftModelProposer(drafter, config.num_speculative_tokens)
    return NgramProposer(
        config.num_speculative_tokens, config.prompt_lookup_max, config.prompt_lookup_min
    )
