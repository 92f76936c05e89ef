"""Who may ask for memory: first come, first served, nobody overtakes, one question at a time.

join ──► [ head, ..., tail ]      only the head asks; refused, it asks again after retry()
           └── question() ──► Reserve ──► answered(was_granted)
"""

from __future__ import annotations


class ReserveQueue:
    """A FIFO of transfers that have something to pull and nowhere to put it.

    Not overtaking is what keeps a large prompt from starving behind small ones.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}  # an ordered set
        self._asked: str | None = None  # a question is out; its answer will come
        self._refused: str | None = None  # the head, if the last answer was "not now"

    def join(self, transfer_id: str) -> None:
        self._waiting[transfer_id] = None

    def leave(self, transfer_id: str) -> None:
        """Give up waiting. A question that is out is still answered. Unknown ones are no error."""
        self._waiting.pop(transfer_id, None)

    def question(self) -> str | None:
        """The transfer that shall ask now, if one shall; counts as asked."""
        head = next(iter(self._waiting), None)
        if head is None or self._asked is not None or head == self._refused:
            return None
        self._asked = head
        return head

    def answered(self, transfer_id: str, *, was_granted: bool) -> None:
        assert transfer_id == self._asked, "an answer to a question that was not asked"
        self._asked = None
        if was_granted:
            self._waiting.pop(transfer_id, None)
        self._refused = None if was_granted else transfer_id

    def retry(self) -> None:
        """Memory may have become free: the refused head may ask again."""
        self._refused = None

    def __len__(self) -> int:
        return len(self._waiting)
