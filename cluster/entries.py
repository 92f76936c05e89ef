"""Directory entries on the wire: one `Member` as JSON, sealed when the deployment has a secret.

Owns the schema check: whatever else lies in Redis under our prefix, junk or forged, raises BadEntry
and nothing else. What is signed cannot be used again later: it has the Redis server's time, which
is one clock for all hosts, and a number that grows with each entry of an incarnation.
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
_CLOCK_SLACK_MS = 1000  # by which a Redis server that takes over may be behind


class BadEntry(Exception):
    """This is not an entry that we can use; the text is why."""


def is_incarnation(name: bytes) -> bool:
    """Whether an entry may stand under this name."""
    return re.match(HEX_ID, name.decode("latin-1")) is not None


@dataclass(frozen=True, slots=True)
class Entry:
    """What an announcer writes of its engine, once.

    `sequence` grows with every entry of the incarnation; `at_ms` is the Redis server's time, and
    `ttl_ms` how long the entry counts; `is_gone`: the engine has left.
    """

    member: Member
    sequence: Count
    at_ms: Annotated[int, Meta(gt=0, le=2**53)]
    ttl_ms: Count
    is_gone: bool = False

    def check_age(self, now_ms: int) -> None:
        """Raise BadEntry unless the entry counts at this time of the Redis server."""
        if now_ms > self.at_ms + self.ttl_ms:
            raise BadEntry("too old")
        if now_ms < self.at_ms - _CLOCK_SLACK_MS:
            raise BadEntry("from the future")


def encode_entry(entry: Entry, secret: ClusterSecret) -> bytes:
    """The value to store."""
    return secret.seal(msgspec.json.encode(entry))


def decode_entry(raw: bytes, secret: ClusterSecret) -> Entry:
    """The entry in a stored value; raises BadEntry. Unknown further fields are ignored."""
    if len(raw) > MAX_ENTRY_BYTES:
        raise BadEntry("longer than an entry may be")
    if not (written := secret.unseal(raw)):
        raise BadEntry("not signed with the cluster secret")
    try:
        entry = msgspec.json.decode(written, type=Entry)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadEntry(str(error)) from error
    member = entry.member
    if not (member.engine_address and member.host_id):
        raise BadEntry("without an address of its engine or a host")
    texts = (member.name, member.model, member.fingerprint, member.device)
    if not all(map(str.isprintable, texts)):
        raise BadEntry("a text that cannot be printed")
    return dataclasses.replace(entry, ttl_ms=min(entry.ttl_ms, _MAX_TTL_MS))
