"""What `baton fsck` and tests see of the hand-offs of one engine: JSON-able values."""

from __future__ import annotations

import math

from .puller import Puller
from .source import Source


def ledger(source: Source, puller: Puller, now_s: float) -> dict[str, object]:
    """The transfers of both sides, their peers, and how many transfers are over."""
    offered = {
        name: {
            "state": each.state.value,
            "key": None if each.offer is None else each.offer.key,
            "puller": each.puller,
            "is_attached": each.is_attached,
            "num_blocks": each.num_blocks,
            "expires_in_s": _seconds_until(each.expires_s, now_s),
        }
        for name, each in source.transfers.items()
    }
    pulled = {
        name: {
            "state": each.state.value,
            "key": each.intent.key,
            "source": each.source,
            "is_reserved": each.reservation is not None,
            "num_pulls_in_flight": len(each.in_flight),
            "expires_in_s": _seconds_until(each.expires_s, now_s),
        }
        for name, each in puller.transfers.items()
    }
    pairs = source.pairs | puller.pairs
    return {
        "transfers": offered | pulled,
        "peers": {incarnation: pair.state.value for incarnation, pair in pairs.items()},
        "num_tombstones": len(source.tombstones) + len(puller.tombstones),
    }


def _seconds_until(expires_s: float, now_s: float) -> float | None:
    return None if expires_s == math.inf else expires_s - now_s
