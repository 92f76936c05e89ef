"""Directory entries on the wire: one `Member` as JSON, sealed when the deployment has a secret.

Owns the schema check: any other value under the prefix, invalid or forged, raises BadEntry and no
other error. Signed entries cannot be replayed later: they have the Redis server's time, which is
one clock for all hosts, and a sequence number that grows with each entry of an incarnation.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from ..core.membership import HEX_ID, Count, Member
from .secret import ClusterSecret

MAX_ENTRY_BYTES = 4096

_MAX_TTL_MS = 60_000
_CLOCK_SLACK_MS = 1000  # by which the clock of a Redis server after a failover may be behind


class BadEntry(Exception):
    """Not a usable entry; the text is the reason."""


def is_incarnation(name: bytes) -> bool:
    """Whether an entry may be stored under this name."""
    return re.match(HEX_ID, name.decode("latin-1")) is not None


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """One write of an announcer about its engine.

    `sequence` grows with every entry of the incarnation; `at_ms`: the Redis server's time;
    `ttl_ms`: how long the entry is valid; `is_gone`: the engine has left.
    """

    member: Member
    sequence: Count
    at_ms: Annotated[int, Meta(gt=0, le=2**53)]
    ttl_ms: Count
    is_gone: bool = False

    def check_age(self, now_ms: int) -> None:
        """Raise BadEntry unless the entry is valid at this time of the Redis server."""
        if now_ms > self.at_ms + self.ttl_ms:
            raise BadEntry("too old")
        if now_ms < self.at_ms - _CLOCK_SLACK_MS:
            raise BadEntry("from the future")


def encode_entry(entry: DirectoryEntry, secret: ClusterSecret) -> bytes:
    """The value to store in Redis."""
    return secret.seal(msgspec.json.encode(entry))


def decode_entry(raw: bytes, secret: ClusterSecret) -> DirectoryEntry:
    """The entry in a stored value; raises BadEntry. Unknown further fields are ignored."""
    if len(raw) > MAX_ENTRY_BYTES:
        raise BadEntry("longer than an entry may be")
    if not (written := secret.unseal(raw)):
        raise BadEntry("not signed with the cluster secret")
    try:
        entry = msgspec.json.decode(written, type=DirectoryEntry)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadEntry(str(error)) from error
    member = entry.member
    if not (member.engine_address and member.host_id):
        raise BadEntry("without an address of its engine or a host")
    texts = (member.name, member.model, member.fingerprint, member.device)
    if not all(map(str.isprintable, texts)):
        raise BadEntry("a text that cannot be printed")
    return dataclasses.replace(entry, ttl_ms=min(entry.ttl_ms, _MAX_TTL_MS))
