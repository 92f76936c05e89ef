"""Directory entries on the wire: one `Member` as JSON, sealed when the deployment has a secret.

Owns the schema check: whatever else lies in Redis under our prefix, junk or forged, raises BadEntry
and nothing else. What is signed cannot be used again later: it has the Redis server's time, which
is one clock for all hosts, and a number that grows with each entry of an incarnation.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from ..core.membership import Member, Role
from .secret import ClusterSecret

MAX_ENTRY_BYTES = 4096

_MAX_TTL_MS = 60_000
_CLOCK_SLACK_MS = 1000  # by which a Redis server that takes over may be behind
_INCARNATION = r"\A[0-9a-f]{32}\Z"
_ADDRESS = r"\A(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}\Z"

_Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
_Name: TypeAlias = Annotated[_Text, Meta(min_length=1)]
_Id: TypeAlias = Annotated[str, Meta(pattern=_INCARNATION)]
_Address: TypeAlias = Annotated[_Text, Meta(pattern=_ADDRESS)]
_Count: TypeAlias = Annotated[int, Meta(gt=0, le=2**40)]


class BadEntry(Exception):
    """This is not an entry that we can use; the text is why."""


def is_incarnation(name: bytes) -> bool:
    """Whether an entry may stand under this name."""
    return re.match(_INCARNATION, name.decode("latin-1")) is not None


@dataclass(frozen=True, slots=True)
class Entry:
    """What an announcer writes of its engine, once.

    `sequence` grows with every entry of the incarnation; `at_ms` is the Redis server's time, and
    `ttl_ms` how long the entry counts; `is_gone`: the engine has left.
    """

    member: Member
    sequence: int
    at_ms: int
    ttl_ms: int
    is_gone: bool = False

    def check_age(self, now_ms: int) -> None:
        """Raise BadEntry unless the entry counts at this time of the Redis server."""
        if now_ms > self.at_ms + self.ttl_ms:
            raise BadEntry("too old")
        if now_ms < self.at_ms - _CLOCK_SLACK_MS:
            raise BadEntry("from the future")


class _Fields(msgspec.Struct, kw_only=True):
    """Those of a Member, and an Entry's."""

    incarnation: _Id
    role: Role
    name: _Name
    address: _Address
    model: _Name
    fingerprint: _Name
    max_model_len: _Count
    block_size: _Count
    num_blocks: _Count
    engine_address: _Address
    host_id: _Id
    device: _Text = ""
    can_constrain: bool = False
    sequence: _Count
    at_ms: Annotated[int, Meta(gt=0, le=2**53)]
    ttl_ms: _Count
    is_gone: bool = False


_OF_MEMBER = tuple(field.name for field in dataclasses.fields(Member))


def encode_entry(entry: Entry, secret: ClusterSecret) -> bytes:
    """The value to store."""
    fields = msgspec.to_builtins(entry)
    return secret.seal(msgspec.json.encode(fields.pop("member") | fields))


def decode_entry(raw: bytes, secret: ClusterSecret) -> Entry:
    """The entry in a stored value; raises BadEntry. Unknown further fields are ignored."""
    if len(raw) > MAX_ENTRY_BYTES:
        raise BadEntry("longer than an entry may be")
    if not (written := secret.unseal(raw)):
        raise BadEntry("not signed with the cluster secret")
    try:
        found = msgspec.json.decode(written, type=_Fields)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadEntry(str(error)) from error
    if not all(map(str.isprintable, (found.name, found.model, found.fingerprint, found.device))):
        raise BadEntry("a text that cannot be printed")
    member = Member(**{name: getattr(found, name) for name in _OF_MEMBER})
    ttl_ms = min(found.ttl_ms, _MAX_TTL_MS)
    return Entry(member, found.sequence, found.at_ms, ttl_ms, found.is_gone)
