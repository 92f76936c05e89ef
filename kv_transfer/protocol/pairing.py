"""How far each pair has come: linked, greeted, ready. Compares fingerprints; sends nothing.

PeerLinked         Hello fits            window is open (puller only)
    └──► LINKED ──────────────► GREETED ───────────────────────────► READY
            └── Hello differs: the pair is refused and forgotten
"""

from __future__ import annotations

import enum

from ...core.errors import FingerprintMismatch, HandoffFailed
from .messages import Hello, Message


class PairState(enum.Enum):
    """Of one peer with an open stream."""

    LINKED = "linked"  # a puller's Hello is out; a source waits for it
    GREETED = "greeted"  # theirs fits ours: transfers may be spoken of
    READY = "ready"  # and its pool can be read


class Pairs:
    """The peers with an open stream. A peer without one is not here."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello  # what this side says of itself
        self._num_links = 0  # streams opened so far, to all peers
        self._states: dict[str, PairState] = {}
        self._links: dict[str, int] = {}
        self._seen: set[str] = set()  # ready peers whose count of steps we read

    def add(self, incarnation: str) -> None:
        """A stream to this peer is open; it has come no further."""
        self._num_links += 1
        self._links[incarnation] = self._num_links
        self._seen.discard(incarnation)
        self._states[incarnation] = PairState.LINKED

    def remove(self, incarnation: str) -> PairState | None:
        """Forget the peer; returns how far it had come."""
        self._links.pop(incarnation, None)
        self._seen.discard(incarnation)
        return self._states.pop(incarnation, None)

    def get(self, incarnation: str) -> PairState | None:
        return self._states.get(incarnation)

    def is_audible(self, incarnation: str, message: Message) -> bool:
        """Whether a message counts: its stream is open and Hello was, or is, said on it.

        What comes before Hello was sent by a peer that had not noticed yet that its stream was
        replaced; it will, and fails on its side what the message was about.
        """
        state = self._states.get(incarnation)
        return state is not None and (state is not PairState.LINKED or isinstance(message, Hello))

    def link(self, incarnation: str) -> int:
        """The number of the peer's present stream: an answer about an earlier one is void."""
        return self._links[incarnation]

    def is_opening(self, incarnation: str, link: int) -> bool:
        """Whether this stream's pair is greeted and waits for its window."""
        is_greeted = self._states.get(incarnation) is PairState.GREETED
        return is_greeted and self._links[incarnation] == link

    def set_ready(self, incarnation: str, *, sees_steps: bool) -> None:
        assert self._states[incarnation] is PairState.GREETED
        self._states[incarnation] = PairState.READY
        if sees_steps:
            self._seen.add(incarnation)

    def sees_steps(self, incarnation: str) -> bool:
        """Whether its count of steps can be read from here."""
        return incarnation in self._seen

    def greet(self, incarnation: str, hello: Hello) -> bool:
        """Take in a linked peer's Hello; True if it is the first.

        Raises FingerprintMismatch that names the first differing field, HandoffFailed if the
        peer is not who the stream was opened to.
        """
        if hello.incarnation != incarnation:
            raise HandoffFailed(f"the stream to {incarnation} is answered by {hello.incarnation}")
        _require_equal(self.hello, hello)
        is_first = self._states[incarnation] is PairState.LINKED
        if is_first:
            self._states[incarnation] = PairState.GREETED
        return is_first

    def ledger(self) -> dict[str, str]:
        return {incarnation: state.value for incarnation, state in self._states.items()}


def _require_equal(ours: Hello, theirs: Hello) -> None:
    if ours.protocol != theirs.protocol:
        raise FingerprintMismatch(f"protocol: {ours.protocol} here, {theirs.protocol} there")
    for name in sorted({*ours.fingerprint, *theirs.fingerprint}):
        here = ours.fingerprint.get(name)
        there = theirs.fingerprint.get(name)
        if here != there:
            raise FingerprintMismatch(f"{name}: {here!r} here, {there!r} there")
