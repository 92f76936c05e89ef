"""What changed in a set of hashes since somebody last looked: what came and went is no change."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.request.token_ids import BlockHash


class NetChanges:
    """Each hash is stored and removed in turn, so a second change takes the first one back.

    Never more hashes than the set had then and has now, however long nobody looks.
    """

    def __init__(self) -> None:
        self._is_stored: dict[BlockHash, bool] = {}

    def __len__(self) -> int:
        return len(self._is_stored)

    def stored(self, block_hashes: Iterable[BlockHash]) -> None:
        self._note(block_hashes, True)

    def removed(self, block_hashes: Iterable[BlockHash]) -> None:
        self._note(block_hashes, False)

    def _note(self, block_hashes: Iterable[BlockHash], is_stored: bool) -> None:
        changes = self._is_stored
        for block_hash in block_hashes:
            if changes.setdefault(block_hash, is_stored) is not is_stored:
                del changes[block_hash]

    def take(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """(removed, stored) since the last call."""
        changes, self._is_stored = self._is_stored, {}
        removed = [h for h, is_stored in changes.items() if not is_stored]
        return removed, [h for h, is_stored in changes.items() if is_stored]
