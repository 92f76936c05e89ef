"""Who may ask for memory: fair between callers, nobody overtakes, one question at a time.

join ──► [ head, ..., tail ]      only the head asks; refused, it asks again after retry()
           └── question() ──► Reserve ──► answered(was_granted)
"""

from __future__ import annotations

from ...core.fair_queue import FairQueue


class ReserveQueue:
    """Transfers that have something to pull and nowhere to put it; of one caller, a FIFO.

    The head that has asked is passed by nobody: a large prompt does not starve behind small ones.
    """

    def __init__(self) -> None:
        self._waiting: FairQueue[str] = FairQueue()
        self._asked: str | None = None  # a question is out; its answer will come
        self._refused: str | None = None  # the head, if the last answer was "not now"

    def join(self, transfer_id: str, caller_id: int = 0, num_blocks: int = 1) -> None:
        self._waiting.add(transfer_id, caller_id, num_blocks)

    def leave(self, transfer_id: str) -> None:
        """Give up waiting. A question that is out is still answered. Unknown ones are no error."""
        if transfer_id in self._waiting:
            self._waiting.remove(transfer_id)

    def question(self) -> str | None:
        """The transfer that shall ask now, if one shall; counts as asked."""
        head = self._waiting.head
        if head is None or self._asked is not None or head == self._refused:
            return None
        self._waiting.pin_head()
        self._asked = head
        return head

    def answered(self, transfer_id: str, *, was_granted: bool) -> None:
        assert transfer_id == self._asked, "an answer to a question that was not asked"
        self._asked = None
        if was_granted and transfer_id == self._waiting.head:  # unless it has left meanwhile
            self._waiting.pop()
        self._refused = None if was_granted else transfer_id

    def retry(self) -> None:
        """Memory may have become free: the refused head may ask again."""
        self._refused = None

    def __len__(self) -> int:
        return len(self._waiting)
