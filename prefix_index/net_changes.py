"""What changed in a set of hashes since somebody last looked: what came and went is no change."""

from __future__ import annotations

from ..core.block_hash import BlockHash


class NetChanges:
    """Each hash is stored and removed in turn, so a second change takes the first one back.

    Never more hashes than the set had then and has now, however long nobody looks.
    """

    def __init__(self) -> None:
        self._is_stored: dict[BlockHash, bool] = {}

    def __len__(self) -> int:
        return len(self._is_stored)

    def stored(self, block_hash: BlockHash) -> None:
        self._note(block_hash, True)

    def removed(self, block_hash: BlockHash) -> None:
        self._note(block_hash, False)

    def _note(self, block_hash: BlockHash, is_stored: bool) -> None:
        if self._is_stored.setdefault(block_hash, is_stored) is not is_stored:
            del self._is_stored[block_hash]

    def take(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """(removed, stored) since the last call."""
        changes, self._is_stored = self._is_stored, {}
        removed = [h for h, is_stored in changes.items() if not is_stored]
        return removed, [h for h, is_stored in changes.items() if is_stored]
