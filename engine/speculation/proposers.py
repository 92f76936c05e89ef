"""Makes the proposer that `--speculative-config` selects."""

from __future__ import annotations

from ...core.speculative_config import DRAFT_MODEL, NGRAM, SpeculativeConfig
from ..execution.runner_protocols import Drafter
from .draft_model import DraftModelProposer
from .ngram import NgramProposer
from .proposer import Proposer


def make_proposer(config: SpeculativeConfig | None, drafter: Drafter) -> Proposer | None:
    """The proposer; None without speculation. `drafter`: of draft models and heads."""
    if config is None:
        return None
    most = config.num_speculative_tokens
    if config.method == NGRAM:
        return NgramProposer(most, config.prompt_lookup_max, config.prompt_lookup_min)
    return DraftModelProposer(drafter, most, is_head=config.method != DRAFT_MODEL)
