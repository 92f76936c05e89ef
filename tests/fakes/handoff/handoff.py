"""Shared by tests of the hand-off: names, tickets, prompts with matching block hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from baton.core.request.request import Ticket
from baton.core.request.token_ids import BlockHash, block_hashes, root_hash
from baton.engine.kv.block_pool import BlockRefs
from baton.kv_transfer.protocol.messages import Hello

SOURCE = "5" * 32
PULLER = "9" * 32
FINGERPRINT = {"model": "toy", "dtype": "float32", "block_size": "4"}
BLOCK_SIZE = 4

_T = TypeVar("_T")


def hello(incarnation: str) -> Hello:
    return Hello(incarnation, FINGERPRINT)


def ticket(number: int, source: str = SOURCE, puller: str = PULLER) -> Ticket:
    return Ticket(f"{number:032x}", source, puller)


def prompt_hashes(num_tokens: int, seed: int = 0) -> list[BlockHash]:
    """The hashes of a prompt's full blocks; different seeds share no block."""
    tokens = range(seed * 1000, seed * 1000 + num_tokens)
    return block_hashes(root_hash("toy"), tokens, BLOCK_SIZE)


def refs(hashes: Sequence[BlockHash], first: int, last: int) -> BlockRefs:
    """Logical blocks [first, last): block i lies in pool block 100 + i with generation 7."""
    indexes = range(first, last)
    return BlockRefs.pack([100 + i for i in indexes], [7] * len(indexes), hashes[first:last])


def only(items: Sequence[object], kind: type[_T]) -> _T:
    """The one item of this kind."""
    (found,) = [item for item in items if isinstance(item, kind)]
    return found
