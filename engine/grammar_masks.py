"""The masks of the constrained sequences that a step samples; runs only for steps with some."""

from __future__ import annotations

from collections.abc import Sequence as Row

from ..core.errors import InvalidRequest
from .execution.constraints import Constraints, within
from .scheduling.schedule import Schedule, ScheduledSequence
from .scheduling.sequence import Sequence


def find_masks(constraints: Constraints, constrained: Row[Sequence], schedule: Schedule) -> None:
    """Set `masks` of these sequences of the schedule. One whose grammar allows no token is added to
    `failed`; drafts that its grammar cannot follow are left out."""
    places = [one.constrained for one in constrained if one.constrained is not None]
    tokens = [(one.token_ids[one.num_prompt_tokens :], one.draft_token_ids) for one in constrained]
    found = constraints.masks([(c, *both) for c, both in zip(places, tokens, strict=True)])
    for sequence, masks in zip(constrained, found, strict=True):
        if sequence.allowed is not None and not isinstance(masks, InvalidRequest):
            masks = within(masks, sequence.allowed)
        if isinstance(masks, InvalidRequest):
            schedule.failed.append((sequence, masks))
            continue
        sequence.masks = masks
        if len(masks) <= len(sequence.draft_token_ids):
            sequence.draft_token_ids = sequence.draft_token_ids[: len(masks) - 1]
    schedule.others = [
        ScheduledSequence(s, min(num_tokens, s.num_unlaunched_tokens))
        for s, num_tokens in schedule.others
    ]
