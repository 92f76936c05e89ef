"""A hand-off between two engines of this process: blocks are copied, nothing else is shared."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from baton.core.request.request import Request
from baton.engine.local import LocalEngine


def hand_over(
    source: LocalEngine,
    puller: LocalEngine,
    request: Request,
    damage: Callable[[Tensor, list[int]], None] | None = None,
) -> list[int]:
    """Prefill on `source`, copy the blocks, decode on `puller`; returns all tokens.

    `damage` is called with the puller's pool and the prompt's blocks before the first decode.
    """
    source.engine.add(request, hold=True)
    tokens: list[int] = []
    while not tokens:
        tokens = [token.token_id for token in source.engine.step().tokens]
    puller.engine.reserve(request)
    reservation = puller.engine.next_reservation()
    assert reservation is not None
    known = list(reservation.block_ids[: reservation.num_known_blocks])
    refs = source.engine.block_refs(request.key, 0, len(known))
    blocks = source.runner.kv.tensor[refs.block_ids.tolist()]
    puller.runner.kv.tensor[known] = blocks
    if damage is not None:
        damage(puller.runner.kv.tensor, known)
    source.engine.abort(request.key)
    puller.engine.start(reservation, tokens[0])
    while puller.engine.has_work:
        tokens += [token.token_id for token in puller.engine.step().tokens]
    return tokens
