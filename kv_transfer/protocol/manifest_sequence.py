"""The manifests of one transfer as the puller takes them in: in order, gap-free, the right blocks.

Judges content only; who sent a manifest and when is the puller's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import HandoffFailed
from ...core.request.token_ids import BlockHash
from .messages import HandoffState, Manifest


class ManifestSequence:
    """What has been announced so far, against what the puller knows the prompt to be.

    `block_hashes` are those of the full blocks; `num_blocks` counts the partial last one too.
    """

    def __init__(self, block_hashes: Sequence[BlockHash], num_blocks: int) -> None:
        self._block_hashes = block_hashes
        self._num_blocks = num_blocks
        self._next_seq = 0
        self._next_index = 0
        self.state: HandoffState | None = None  # set by the last manifest

    @property
    def is_complete(self) -> bool:
        return self.state is not None

    def accept(self, manifest: Manifest) -> bool:
        """Take in the next manifest; False for a double of an earlier one, which changes nothing.

        Raises HandoffFailed on a gap, on another prompt's blocks, or if the end does not fit.
        """
        if manifest.seq < self._next_seq:
            return False
        if self.is_complete:
            raise HandoffFailed(f"manifest {manifest.seq} came after the last one")
        if manifest.seq > self._next_seq:
            raise HandoffFailed(f"manifest {manifest.seq} came where {self._next_seq} was due")
        for index, ref in enumerate(manifest.blocks, start=self._next_index):
            if ref.index != index or index >= self._num_blocks:
                raise HandoffFailed(f"block {ref.index} was announced where {index} was due")
            if ref.hash != self._expected_hash(index):
                raise HandoffFailed(f"block {index} holds another prompt's KV")
        self._check_end(manifest)
        self._next_seq += 1
        self._next_index += len(manifest.blocks)
        self.state = manifest.state
        return True

    def _expected_hash(self, index: int) -> BlockHash | None:
        return self._block_hashes[index] if index < len(self._block_hashes) else None

    def _check_end(self, manifest: Manifest) -> None:
        state = manifest.state
        if state is None:
            return
        announced = self._next_index + len(manifest.blocks)
        if not announced == state.num_blocks == self._num_blocks:
            raise HandoffFailed(
                f"{announced} blocks were announced and {state.num_blocks} promised, "
                f"but the prompt has {self._num_blocks}"
            )
