"""Directory entries: ours can be read back; invalid ones are rejected without an error."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.entries import (
    MAX_ENTRY_BYTES,
    BadEntry,
    DirectoryEntry,
    decode_entry,
    encode_entry,
)
from baton.cluster.secret import TAG_BYTES, ClusterSecret
from baton.core.membership import Member, Role

MEMBER = Member(
    "ab" * 16, Role.DECODE, "decode-0", "127.0.0.1:5000", "demo", "f1", 512, 16, 64,
    engine_address="[::1]:5001", host_id="cd" * 16, device="cuda:0,1", can_constrain=True,
)  # fmt: skip
OF_ENTRY = {"sequence", "at_ms", "ttl_ms", "is_gone"}
ENTRY = DirectoryEntry(MEMBER, sequence=3, at_ms=1_790_000_000_000, ttl_ms=6000)


def changed(raw: bytes, changes: dict[str, object], num_tag_bytes: int = 0) -> bytes:
    """A changed entry with the seal of the original one."""
    written, seal = raw[: len(raw) - num_tag_bytes], raw[len(raw) - num_tag_bytes :]
    entry = json.loads(written)
    of_entry = changes.keys() & OF_ENTRY
    entry |= {name: changes[name] for name in of_entry}
    entry["member"] |= {name: changes[name] for name in changes.keys() - of_entry}
    return json.dumps(entry, separators=(",", ":")).encode() + seal


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@pytest.mark.parametrize("secret", [None, "s3cret", "ключ"])
def test_round_trip(secret: str | None) -> None:
    assert decode_entry(encode_entry(ENTRY, ClusterSecret(secret)), ClusterSecret(secret)) == ENTRY


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "router"},
        {"incarnation": "AB" * 16},
        {"incarnation": "ab" * 16 + "\n"},
        {"address": "127.0.0.1"},
        {"address": "http://169.254.169.254:80"},
        {"address": "unix:/tmp/x:1"},
        {"engine_address": ""},
        {"engine_address": None},
        {"engine_address": "http://169.254.169.254:80"},
        {"engine_address": "unix:/tmp/x:1"},
        {"host_id": ""},
        {"host_id": "CD" * 16},
        {"host_id": "cd" * 15},
        {"name": ""},
        {"name": "a\x1b[31m"},
        {"name": "\ud800"},
        {"model": "m" * 2000},
        {"max_model_len": True},
        {"max_model_len": -1},
        {"num_blocks": 1e3},
        {"block_size": "16"},
        {"fingerprint": None},
        {"device": "gpu\n"},
        {"sequence": 0},
        {"sequence": True},
        {"at_ms": "now"},
        {"at_ms": -1},
        {"ttl_ms": None},
    ],
)
def test_a_wrong_field_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadEntry):
        decode_entry(changed(encode_entry(ENTRY, ClusterSecret()), changes), ClusterSecret())


def test_a_member_need_not_name_its_device() -> None:
    nameless = dataclasses.replace(ENTRY, member=dataclasses.replace(MEMBER, device=""))
    entry = json.loads(encode_entry(nameless, ClusterSecret()))
    del entry["member"]["device"]
    assert decode_entry(json.dumps(entry).encode(), ClusterSecret()) == nameless
    assert decode_entry(encode_entry(nameless, ClusterSecret("s")), ClusterSecret("s")) == nameless


@pytest.mark.parametrize("begin, end", [("[", "]"), ('{"a":', "}")])
def test_nested_junk_is_no_entry_at_any_depth(begin: str, end: str) -> None:
    inner = "1" if begin != "[" else ""
    for depth in range(1, MAX_ENTRY_BYTES // (len(begin) + 1), 3):
        for name in ("a", "member"):
            raw = f'{{"{name}":{begin * depth}{inner}{end * depth}}}'.encode()
            for secret in (ClusterSecret(), ClusterSecret("secret")):
                with pytest.raises(BadEntry):
                    decode_entry(secret.seal(raw), secret)


def test_unknown_fields_are_for_later_versions() -> None:
    raw = changed(encode_entry(ENTRY, ClusterSecret()), {"zone": ["a"]})
    assert decode_entry(raw, ClusterSecret()) == ENTRY


@given(st.binary(max_size=200) | json_values.map(lambda v: json.dumps(v).encode()))
def test_junk_is_refused(raw: bytes) -> None:
    for stored in (raw, b'{"member":%b}' % raw):
        with pytest.raises(BadEntry):
            decode_entry(stored, ClusterSecret())


@given(st.data())
def test_a_mutated_entry_is_refused_or_well_formed(data: st.DataObject) -> None:
    raw = bytearray(encode_entry(ENTRY, ClusterSecret()))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] = data.draw(st.integers(0, 255))
    try:
        member = decode_entry(bytes(raw), ClusterSecret()).member
    except BadEntry:
        return
    for field in dataclasses.fields(Member):
        assert type(getattr(member, field.name)) is type(getattr(MEMBER, field.name))


def test_deep_or_huge_entries_are_refused() -> None:
    for raw in (b"[" * MAX_ENTRY_BYTES, b" " * (MAX_ENTRY_BYTES + 1), b"9" * MAX_ENTRY_BYTES):
        with pytest.raises(BadEntry):
            decode_entry(raw, ClusterSecret())


def test_only_holders_of_the_secret_can_write_entries() -> None:
    right = encode_entry(ENTRY, ClusterSecret("right"))
    assert decode_entry(changed(right, {}, TAG_BYTES), ClusterSecret("right")) == ENTRY
    changes = ({"address": "10.0.0.1:1"}, {"engine_address": "10.0.0.1:1"}, {"host_id": "ef" * 16})
    for raw in (
        encode_entry(ENTRY, ClusterSecret()),
        encode_entry(ENTRY, ClusterSecret("wrong")),
        *(changed(right, change, TAG_BYTES) for change in changes),
    ):
        with pytest.raises(BadEntry):
            decode_entry(raw, ClusterSecret("right"))


def test_what_is_signed_covers_time_sequence_and_goodbye() -> None:
    right = encode_entry(ENTRY, ClusterSecret("right"))
    for change in ({"at_ms": ENTRY.at_ms + 1}, {"sequence": 4}, {"ttl_ms": 7}, {"is_gone": True}):
        with pytest.raises(BadEntry):
            decode_entry(changed(right, change, TAG_BYTES), ClusterSecret("right"))


def test_an_entry_counts_for_its_ttl_and_no_writer_makes_that_long() -> None:
    ENTRY.check_age(ENTRY.at_ms - 900)  # a Redis replica that took over may be a little behind
    ENTRY.check_age(ENTRY.at_ms + 6000)
    for now_ms in (ENTRY.at_ms + 6001, ENTRY.at_ms - 1001, ENTRY.at_ms + 3_600_000, 0):
        with pytest.raises(BadEntry):
            ENTRY.check_age(now_ms)
    eternal = dataclasses.replace(ENTRY, ttl_ms=10**9)
    assert decode_entry(encode_entry(eternal, ClusterSecret()), ClusterSecret()).ttl_ms == 60_000
