"""Two ends of a channel prove to each other that they hold the same key, which is never sent.

    dialer                                                       listener
      │ ── opening: purpose, who, whom, where, key id, nonce ──►   │ for me, at an address of mine?
      │ ◄─────────────────── challenge: nonce, listener's proof ── │
      │ ── answer: dialer's proof ─────────────────────────────►   │

A proof is an HMAC-SHA256 over everything sent before it and over the direction, so none can be used
for another purpose, peer, incarnation, address or direction, nor reflected to its sender. Both
nonces are new for every connection and no clock is read: recorded messages are never accepted. The
listener refuses a dialer that dialled another address, so a process at the address of a dead peer
cannot relay the handshake to a live one. The key id selects one of several keys that a listener may
have; a dialer that does not name one of these gets no proof.

Later data on the channel is protected not by this, but by TLS, or by the kernel on one host. Knows
no transport, no role and no secret store; raises only Unauthenticated, whatever it receives.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..errors import Unauthenticated

NONCE_BYTES = PROOF_BYTES = 32
_MAGIC = b"BATONHS1"
_MAX_PURPOSE_BYTES = 16
KEY_ID_BYTES = 8
_OPENING = struct.Struct(f"=8s{_MAX_PURPOSE_BYTES}s16s16s32s{KEY_ID_BYTES}s{NONCE_BYTES}s")
OPENING_BYTES = _OPENING.size
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
ANSWER_BYTES = PROOF_BYTES

_BY_DIALER, _BY_LISTENER = b"dialer", b"listener"


@dataclass(frozen=True, slots=True)
class Opening:
    """Dialer, listener, purpose and dialled address. Ids are 32 hex digits, `where` is the
    address's digest.

    Unverified until the answer is checked.
    """

    purpose: bytes
    dialer: str
    listener: str
    where: bytes
    key_id: bytes
    nonce: bytes

    def pack(self) -> bytes:
        assert 0 < len(self.purpose) <= _MAX_PURPOSE_BYTES
        ids = (bytes.fromhex(self.dialer), bytes.fromhex(self.listener))
        return _OPENING.pack(_MAGIC, self.purpose, *ids, self.where, self.key_id, self.nonce)

    @classmethod
    def unpack(cls, packed: bytes) -> Opening:
        """Raises Unauthenticated if it is no opening of this version."""
        if len(packed) != OPENING_BYTES or packed[: len(_MAGIC)] != _MAGIC:
            raise Unauthenticated("the message is no opening of a handshake")
        _, purpose, dialer, listener, where, key_id, nonce = _OPENING.unpack(packed)
        return cls(purpose.rstrip(b"\0"), dialer.hex(), listener.hex(), where, key_id, nonce)


def where(address: str) -> bytes:
    """The digest of an address, as in an opening."""
    return hashlib.sha256(address.encode()).digest()


def key_id(key: bytes) -> bytes:
    """The id of a key, as in an opening."""
    return hmac.digest(key, b"key id", "sha256")[:KEY_ID_BYTES]


class Dialer:
    """The end that connects: send `opening`, then `answer` to the challenge."""

    def __init__(
        self, key: bytes, purpose: bytes, *, dialer: str, listener: str, address: str
    ) -> None:
        """`address`: the one that was dialled, as the listener announced it."""
        nonce = os.urandom(NONCE_BYTES)
        self._key = key
        opening = Opening(purpose, dialer, listener, where(address), key_id(key), nonce)
        self.opening = opening.pack()

    def answer(self, challenge: bytes, terms: bytes = b"") -> bytes:
        """Check the listener's proof; returns the dialer's, which covers `terms`, the data sent
        with it.

        Raises Unauthenticated if the other end does not hold the key.
        """
        if len(challenge) != CHALLENGE_BYTES:
            raise Unauthenticated("the message is no challenge of a handshake")
        nonce, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _prove(self._key, _BY_LISTENER, self.opening, nonce)):
            raise Unauthenticated("the other end does not hold the key")
        return _prove(self._key, _BY_DIALER, self.opening, nonce, terms)


class Listener:
    """The end that was connected to, for one connection: `challenge`, then `check`."""

    def __init__(
        self,
        key_of: Callable[[Opening], bytes | None],
        purposes: Collection[bytes],
        addresses: Collection[str],
    ) -> None:
        """`key_of` returns the key for an opening, or None to refuse it."""
        self._key_of = key_of
        self._purposes = purposes
        self._addresses = frozenset(map(where, addresses))
        self._opened: tuple[Opening, bytes, bytes, bytes] | None = None

    def challenge(self, packed: bytes) -> bytes:
        """The challenge to send for an opening. Raises Unauthenticated."""
        opening = Opening.unpack(packed)
        if opening.purpose not in self._purposes:
            raise Unauthenticated("the handshake is for another purpose")
        if opening.where not in self._addresses:
            raise Unauthenticated("the handshake is for another address")
        key = self._key_of(opening)
        if key is None:
            raise Unauthenticated("the handshake is for another process")
        if not hmac.compare_digest(key_id(key), opening.key_id):
            raise Unauthenticated("the other end does not hold the key")
        nonce = os.urandom(NONCE_BYTES)
        self._opened = (opening, packed, nonce, key)
        return nonce + _prove(key, _BY_LISTENER, packed, nonce)

    def check(self, answer: bytes, terms: bytes = b"") -> Opening:
        """The opening, which is verified now. `terms`: the data received with the answer. Raises
        Unauthenticated."""
        if self._opened is None:
            raise Unauthenticated("an answer was received before an opening")
        opening, packed, nonce, key = self._opened
        self._opened = None  # one answer per challenge
        if not hmac.compare_digest(answer, _prove(key, _BY_DIALER, packed, nonce, terms)):
            raise Unauthenticated("the other end does not hold the key")
        return opening


def _prove(key: bytes, by: bytes, opening: bytes, nonce: bytes, terms: bytes = b"") -> bytes:
    """All parts but the last have a fixed length, given the direction: different parts never give
    the same bytes."""
    return hmac.digest(key, by + opening + nonce + terms, "sha256")
