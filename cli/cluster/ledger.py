"""What an engine reports of itself in its ledger, as typed values.

The JSON comes from another process, perhaps of another version: what does not parse is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec


class BadLedger(Exception):
    """Not a ledger of a known form; the text gives the reason."""


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
    """One side's view of a hand-off. `key`: the request, unless its prompt has not come.

    A source names its `puller`, a puller its `source`: incarnations.
    """

    state: str
    key: str | None
    puller: str | None = None
    source: str | None = None

    @property
    def is_source(self) -> bool:
        return self.puller is not None

    @property
    def peer(self) -> str | None:
        return self.puller or self.source


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
        raw = msgspec.json.decode(text)
        if isinstance(raw, dict) and "error" in raw:
            raise BadLedger(f"engine {raw.get('incarnation')}: {raw['error']}")
        return msgspec.convert(raw, Ledger)
    except msgspec.MsgspecError as error:
        raise BadLedger(f"a ledger that is not understood: {error}") from error
