"""Directory entries on the wire: one `Member` as JSON, signed when the deployment has a secret.

Owns the schema check: whatever else lies in Redis under our prefix, junk or forged, raises BadEntry
and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from ..core.membership import Member, Role
from .secret import is_signed, sign

MAX_ENTRY_BYTES = 4096

_MAX_TEXT = 1024
_MAX_COUNT = 2**40
_INCARNATION = re.compile(r"[0-9a-f]{32}\Z")
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}\Z")


class BadEntry(Exception):
    """This is not an entry that we can use; the text says why."""


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def encode_entry(member: Member, secret: str | None) -> bytes:
    """The value to store for this member."""
    fields = dataclasses.asdict(member) | {"role": member.role.value}
    if secret:
        fields["signature"] = sign(secret, _canonical(fields))
    return _canonical(fields)


def decode_entry(raw: bytes, secret: str | None) -> Member:
    """The member in a stored value; raises BadEntry. Unknown further fields are ignored."""
    if len(raw) > MAX_ENTRY_BYTES:
        raise BadEntry("longer than an entry may be")
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadEntry("not JSON") from error
    if not isinstance(fields, dict):
        raise BadEntry("not an object")
    if secret:
        _check_signature(fields, secret)
    try:
        role = Role(_text(fields, "role"))
    except ValueError as error:
        raise BadEntry("role is unknown") from error
    return Member(
        incarnation=_matching(fields, "incarnation", _INCARNATION),
        role=role,
        name=_text(fields, "name"),
        address=_matching(fields, "address", _ADDRESS),
        model=_text(fields, "model"),
        fingerprint=_text(fields, "fingerprint"),
        max_model_len=_count(fields, "max_model_len"),
        block_size=_count(fields, "block_size"),
        num_blocks=_count(fields, "num_blocks"),
        device=_text(fields, "device") if fields.get("device") else "",
        can_constrain=fields.get("can_constrain") is True,
    )


def _check_signature(fields: dict[str, Any], secret: str) -> None:
    signature = fields.pop("signature", None)
    if not isinstance(signature, str) or not is_signed(secret, _canonical(fields), signature):
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


def _count(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 < value <= _MAX_COUNT:
        raise BadEntry(f"{name} is not a positive count")
    return value
