"""How many blocks each engine says, through the prefix index, that it has cached."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import aclosing

from ...prefix_index.messages import BadMessage, IndexAway, Snapshot, decode
from ...prefix_index.mirror import FollowerLink, read_snapshot

_ASK_S = 0.3  # the first question may come before we listen to answers
_ANSWER_S = 2.0  # an engine answers within 1.5 s, however many ask


async def count_published(
    link: FollowerLink, incarnations: Collection[str], timeout_s: float = _ANSWER_S
) -> dict[str, int]:
    """Ask for snapshots and count what is in them. Who does not answer is absent."""
    counts: dict[str, int] = {}
    asking = asyncio.create_task(_ask(link, incarnations, counts))
    try:
        async with asyncio.timeout(timeout_s), aclosing(link.messages()) as messages:
            async for raw in messages:
                await _take(link, raw, incarnations, counts)
                if counts.keys() >= set(incarnations):
                    break
    except TimeoutError:
        pass
    finally:
        asking.cancel()
        await asyncio.wait({asking})
    return counts


async def _ask(link: FollowerLink, incarnations: Collection[str], counts: dict[str, int]) -> None:
    while True:
        for incarnation in set(incarnations) - counts.keys():
            try:
                await link.request_snapshot(incarnation)
            except IndexAway:
                return
        await asyncio.sleep(_ASK_S)


async def _take(
    link: FollowerLink, raw: bytes, incarnations: Collection[str], counts: dict[str, int]
) -> None:
    """Of all that is published only snapshots of these engines count."""
    try:
        message = decode(raw)
        if not isinstance(message, Snapshot) or message.incarnation not in incarnations:
            return
        counts[message.incarnation] = len(await read_snapshot(link, message))
    except (BadMessage, IndexAway):  # e.g. a newer snapshot is being written
        return
