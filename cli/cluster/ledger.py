"""What an engine says of itself when asked for its ledger, as typed values.

The JSON comes from another process, perhaps of another version: what does not parse is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class BadLedger(Exception):
    """Not a ledger that we understand; the text says why."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Every block of a pool is in exactly one of the first four states."""

    free: int
    cached: int
    held: int
    reserved: int
    total: int


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request as an engine has it."""

    state: str  # waiting, running, held, reserved
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LedgerTransfer:
    """One side's view of a hand-off. `key`: the request, unless its prompt has not come."""

    is_source: bool  # told by the source; `peer` is the puller then
    peer: str
    state: str
    key: str | None


@dataclass(frozen=True, slots=True)
class Ledger:
    """One engine's. `peers`: incarnations with an open link, and how far each pair has come."""

    node: str
    blocks: Blocks
    requests: Mapping[str, HeldRequest]
    transfers: Mapping[str, LedgerTransfer]
    peers: Mapping[str, str]
    num_fences: int


def parse_ledger(text: str) -> Ledger:
    """Raises BadLedger."""
    try:
        raw = json.loads(text)
        if "error" in raw:
            raise BadLedger(f"engine {raw.get('incarnation')}: {raw['error']}")
        return Ledger(
            node=str(raw["node"]),
            blocks=Blocks(**{name: int(count) for name, count in raw["blocks"].items()}),
            requests={
                key: HeldRequest(str(one["state"]), int(one["num_blocks"]))
                for key, one in raw["requests"].items()
            },
            transfers={key: _transfer(one) for key, one in raw["transfers"].items()},
            peers={str(peer): str(state) for peer, state in raw["peers"].items()},
            num_fences=int(raw["num_fences"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadLedger(f"a ledger that is not understood: {error!r}") from error


def _transfer(raw: Mapping[str, Any]) -> LedgerTransfer:
    is_source = "puller" in raw
    return LedgerTransfer(
        is_source, str(raw["puller" if is_source else "source"]), str(raw["state"]), raw["key"]
    )
