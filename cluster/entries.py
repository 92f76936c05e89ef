"""Directory entries on the wire: one `Member` as JSON, signed when the deployment has a secret.

Owns the schema check: whatever else lies in Redis under our prefix, junk or forged, raises BadEntry
and nothing else. What is signed cannot be used again later: it has the Redis server's time, which
is one clock for all hosts, and a number that grows with each entry of an incarnation.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

from ..core.membership import Member, Role
from .secret import ClusterSecret

MAX_ENTRY_BYTES = 4096

_MAX_TEXT = 1024
_MAX_COUNT = 2**40
_MAX_TIME_MS = 2**53
_MAX_TTL_MS = 60_000
_CLOCK_SLACK_MS = 1000  # by which a Redis server that takes over may be behind
_INCARNATION = re.compile(r"[0-9a-f]{32}\Z")
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}\Z")


class BadEntry(Exception):
    """This is not an entry that we can use; the text is why."""


def is_incarnation(name: bytes) -> bool:
    """Whether an entry may stand under this name."""
    return len(name) == 32 and _INCARNATION.match(name.decode("latin-1")) is not None


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


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


def encode_entry(entry: Entry, secret: ClusterSecret) -> bytes:
    """The value to store."""
    fields = dataclasses.asdict(entry.member) | {
        "role": entry.member.role.value,
        "sequence": entry.sequence,
        "at_ms": entry.at_ms,
        "ttl_ms": entry.ttl_ms,
        "is_gone": entry.is_gone,
    }
    if (signature := secret.sign(_canonical(fields))) is not None:
        fields["signature"] = signature
    return _canonical(fields)


def decode_entry(raw: bytes, secret: ClusterSecret) -> Entry:
    """The entry in a stored value; raises BadEntry. Unknown further fields are ignored."""
    if len(raw) > MAX_ENTRY_BYTES:
        raise BadEntry("longer than an entry may be")
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadEntry("not JSON") from error
    if not isinstance(fields, dict):
        raise BadEntry("not an object")
    if any(isinstance(value, dict | list) for value in fields.values()):
        raise BadEntry("nested")  # deep enough, it could not be encoded again
    if secret.current:
        _check_signature(fields, secret)
    try:
        role = Role(_text(fields, "role"))
    except ValueError as error:
        raise BadEntry("role is unknown") from error
    member = Member(
        incarnation=_matching(fields, "incarnation", _INCARNATION),
        role=role,
        name=_text(fields, "name"),
        address=_matching(fields, "address", _ADDRESS),
        model=_text(fields, "model"),
        fingerprint=_text(fields, "fingerprint"),
        max_model_len=_count(fields, "max_model_len"),
        block_size=_count(fields, "block_size"),
        num_blocks=_count(fields, "num_blocks"),
        engine_address=_matching(fields, "engine_address", _ADDRESS),
        host_id=_matching(fields, "host_id", _INCARNATION),
        device=_text(fields, "device") if fields.get("device") else "",
        can_constrain=fields.get("can_constrain") is True,
    )
    ttl_ms = min(_count(fields, "ttl_ms"), _MAX_TTL_MS)
    return Entry(
        member,
        sequence=_count(fields, "sequence"),
        at_ms=_count(fields, "at_ms", _MAX_TIME_MS),
        ttl_ms=ttl_ms,
        is_gone=fields.get("is_gone") is True,
    )


def _check_signature(fields: dict[str, Any], secret: ClusterSecret) -> None:
    signature = fields.pop("signature", None)
    if not isinstance(signature, str) or not secret.has_signed(_canonical(fields), signature):
        raise BadEntry("not signed with the cluster secret")


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT or not value.isprintable():
        raise BadEntry(f"{name} is not a short text")
    return value


def _matching(fields: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = _text(fields, name)
    if not pattern.match(value):
        raise BadEntry(f"{name} is malformed")
    return value


def _count(fields: dict[str, Any], name: str, most: int = _MAX_COUNT) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 < value <= most:
        raise BadEntry(f"{name} is not a positive count")
    return value
