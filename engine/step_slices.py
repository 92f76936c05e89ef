"""From what the scheduler planned to what the runner launches: one SequenceSlice a sequence that
is not among the columns of decode_batch.py."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Row

from ..core.request.request import key_at, token_key
from ..kernels.sampling.sample_spec import SampleSpec
from .execution.batch import SequenceSlice
from .execution.constraints import Mask, without
from .scheduling.outputs import ChunkLaunched
from .scheduling.schedule import ScheduledSequence
from .scheduling.sequence import Sequence

_AWAITED = (0,)  # stands for the token that is not known yet


def launch_slices(
    planned: Row[ScheduledSequence],
    previous: Mapping[Sequence, int],
    masks: Mapping[Sequence, Row[Mask]],
    eos_token_ids: Collection[int],
) -> list[SequenceSlice]:
    """What to launch of each sequence, which takes note that it is launched.

    `previous` has the slices of the step in flight: a token that is not known yet comes from there.
    `masks` has the tokens that may be sampled, if not all may, behind each draft too.
    """
    slices = []
    for sequence, num_tokens in planned:
        if sequence.draft_token_ids:
            slices.append(_verifying_slice(sequence, masks.get(sequence, ()), eos_token_ids))
            continue
        start, num_known = sequence.num_launched_tokens, len(sequence.token_ids)
        end = start + num_tokens
        is_prompt = start < sequence.num_prefill_tokens
        is_awaited = start == num_known
        token_ids = _AWAITED if is_awaited else sequence.token_ids[start:end]
        follows = previous[sequence] if is_awaited else None
        sample = next_token_id = None
        if end == num_known + sequence.num_awaited_tokens:
            sample = sample_spec(sequence, end, masks.get(sequence, ()), eos_token_ids)
            sequence.num_awaited_tokens += sequence.awaits_tokens
        elif end < num_known:
            next_token_id = sequence.token_ids[end]
        sequence.num_launched_tokens = end
        targets: Row[int] = ()
        first_target = num_top = 0
        if is_prompt and sequence.owes_prompt_logprobs:
            first = max(start + 1, sequence.next_prompt_logprob)
            targets = sequence.request.prompt_token_ids[first : end + 1]
            first_target = first - start - 1
            num_top = sequence.sampling.prompt_logprobs or 0
        slices.append(
            SequenceSlice(
                token_ids,
                start,
                sequence.block_ids,
                sample,
                follows,
                targets,
                first_target,
                num_top,
                sequence.adapter_slot,
                is_prompt=is_prompt,
                next_token_id=next_token_id,
            )
        )
    return slices


def _verifying_slice(
    sequence: Sequence, masks: Row[Mask], eos_token_ids: Collection[int]
) -> SequenceSlice:
    """Its last token and its drafts, with what is sampled behind each of them."""
    start, drafts = sequence.num_launched_tokens, sequence.draft_token_ids
    assert start == sequence.num_tokens - 1, "drafts follow a token that is known"
    specs = [
        sample_spec(sequence, start + 1 + place, masks, eos_token_ids, drafts[:place])
        for place in range(len(drafts) + 1)
    ]
    sequence.num_awaited_tokens += 1
    sequence.num_launched_tokens += 1 + len(drafts)
    return SequenceSlice(
        [sequence.token_ids[start], *drafts],
        start,
        sequence.block_ids,
        specs.pop(),
        adapter_slot=sequence.adapter_slot,
        draft_samples=specs,
    )


def launched_chunks(planned: Iterable[ScheduledSequence], step: int) -> list[ChunkLaunched]:
    """What step number `step` will complete of held requests, behind `launch_slices`."""
    held = [sequence for sequence, _ in planned if sequence.is_held]
    return [
        ChunkLaunched(one.key, one.num_launched_tokens, not one.is_prefilling, step) for one in held
    ]


def sample_spec(
    sequence: Sequence,
    position: int,
    masks: Row[Mask],
    eos_token_ids: Collection[int],
    drafts: Row[int] = (),
) -> SampleSpec:
    """How to sample the token at `position`, which comes behind so many `drafts`, for its forks too
    if it is their first."""
    request = sequence.request
    params = request.sampling
    key = 0 if sequence.sample_key is None else key_at(sequence.sample_key, position)
    is_too_early = position < len(request.prompt_token_ids) + params.min_tokens
    forbidden = (*eos_token_ids, *params.stop_token_ids) if is_too_early else ()
    allowed = None
    if masks:
        allowed, forbidden = without(masks[len(drafts)], forbidden), ()
    counts = sequence.counts()
    if counts is not None and drafts:
        counts = counts.behind(drafts)
    fork_keys: tuple[int, ...] = ()
    if sequence.forks and position == request.num_known_tokens:
        indices = [fork.sample_index for fork in sequence.forks]
        fork_keys = tuple(token_key(params.seed, index, position) for index in indices)
    return SampleSpec(params, key, forbidden, counts, fork_keys, allowed, sequence.num_candidates)
