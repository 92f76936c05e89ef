"""Changing the cluster secret: which processes accept each other during the change."""

from __future__ import annotations

import itertools

import pytest

from baton.cluster.entries import BadEntry, DirectoryEntry, decode_entry, encode_entry
from baton.cluster.exposure import check_secret
from baton.cluster.secret import ClusterSecret, operator_key
from baton.core.channels.handshake import Dialer, Listener, key_id
from baton.core.config import ClusterConfig
from baton.core.errors import StartupFailed, Unauthenticated
from baton.core.membership import Member, Role
from baton.gateway.security.accepted_keys import AcceptedKeys

OLD, NEW = "the secret of last year", "the secret of this year"
STEPS = (
    ClusterSecret(OLD),
    ClusterSecret(OLD, NEW),
    ClusterSecret(NEW, OLD),
    ClusterSecret(NEW),
)
ALL = (*STEPS, ClusterSecret("another one, of strangers"), ClusterSecret())
PAIRS = list(itertools.product(ALL, repeat=2))
IDS = [f"{ALL.index(one)}-{ALL.index(other)}" for one, other in PAIRS]
ADDRESS = "10.0.0.1:5000"
MEMBER = Member(
    "ab" * 16, Role.DECODE, "decode-0", ADDRESS, "demo", "f1", 512, 16, 64,
    engine_address="10.0.0.1:5001", host_id="cd" * 16,
)  # fmt: skip
ENTRY = DirectoryEntry(MEMBER, sequence=1, at_ms=1_790_000_000_000, ttl_ms=6000)


def is_accepted(by: ClusterSecret, who: ClusterSecret) -> bool:
    """The rule: the key that one process signs and dials with is accepted by the other."""
    return who.current == by.current or (who.current == by.also and by.also is not None)


def shakes_hands(dialing: ClusterSecret, listening: ClusterSecret) -> bool:
    keys = listening.keys_by_id()
    key, where = dialing.dialing_key, {"listener": "bb" * 16, "address": ADDRESS}
    ours = Dialer(key, b"session", dialer="aa" * 16, **where)
    theirs = Listener(lambda opening: keys.get(opening.key_id), b"session", (ADDRESS,))
    try:
        theirs.check(ours.answer(theirs.challenge(ours.opening)))
    except Unauthenticated:
        return False
    return True


def reads_entry(of: ClusterSecret, by: ClusterSecret) -> bool:
    try:
        return decode_entry(encode_entry(ENTRY, of), by) == ENTRY
    except BadEntry:
        return False


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=IDS)
def test_every_pair_of_configurations(one: ClusterSecret, other: ClusterSecret) -> None:
    expected = is_accepted(by=other, who=one)
    assert shakes_hands(one, other) == expected
    if other.current:  # a process without a secret accepts every entry
        assert reads_entry(one, other) == expected
        assert (other.unseal(one.seal(b"blocks")) == b"blocks") == expected


def test_neighbouring_steps_accept_each_other_both_ways() -> None:
    for before, after in itertools.pairwise(STEPS):
        assert is_accepted(before, after)
        assert is_accepted(after, before)
    assert not is_accepted(STEPS[0], STEPS[3])


def test_a_listener_proves_nothing_to_who_names_no_key_of_its_own() -> None:
    """A listener's proof would let a stranger test guesses of a weak secret offline, so it proves
    nothing to a peer with an unknown key."""
    keys = ClusterSecret(OLD, NEW).keys_by_id()
    theirs = Listener(lambda opening: keys.get(opening.key_id), b"session", (ADDRESS,))
    stranger = ClusterSecret("a guess").dialing_key
    ours = Dialer(stranger, b"session", dialer="aa" * 16, listener="bb" * 16, address=ADDRESS)
    with pytest.raises(Unauthenticated):
        theirs.challenge(ours.opening)
    any_key = Listener(lambda _: next(iter(keys.values())), b"session", (ADDRESS,))
    with pytest.raises(Unauthenticated):
        any_key.challenge(ours.opening)


def test_a_key_s_id_is_not_the_key_and_not_another_s() -> None:
    ids = {key_id(ClusterSecret(secret).dialing_key) for secret in (OLD, NEW, None)}
    assert len(ids) == 3
    assert all(len(each) == 8 for each in ids)
    for secret in (OLD, NEW):
        assert key_id(ClusterSecret(secret).dialing_key) not in ClusterSecret(secret).dialing_key


def test_both_operators_may_look_meanwhile() -> None:
    accepted = AcceptedKeys(None, ClusterSecret(NEW, OLD))
    for secret in (OLD, NEW):
        assert accepted.key(operator_key(secret)).caller.tenant == "@operator"
    with pytest.raises(Unauthenticated):
        accepted.key(operator_key("another"))


def test_a_secret_is_not_shown() -> None:
    assert OLD not in repr(ClusterSecret(OLD, NEW))
    assert NEW not in repr(ClusterSecret(OLD, NEW))


def test_the_other_secret_stands_beside_one() -> None:
    with pytest.raises(StartupFailed, match="--cluster-secret-also"):
        ClusterConfig(cluster_secret_also=NEW)
    config = ClusterConfig(cluster_secret=OLD, cluster_secret_also="")  # as from the environment
    assert ClusterSecret.of(config) == ClusterSecret(OLD)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "reaches its Redis or a port"),
        ({"cluster_ca": "a", "cluster_cert": "b", "cluster_key": "c"}, "writes to its Redis"),
        ({"cluster_secret": "short"}, "fewer than 16 characters"),
        ({"cluster_secret": OLD, "cluster_secret_also": "short"}, "fewer than 16 characters"),
    ],
)
def test_no_secret_or_a_weak_one_is_said_loudly(
    given: dict[str, str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_secret("gateway", ClusterConfig(**given))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("INSECURE: ")
    assert message in record.getMessage()
    assert "short" not in record.getMessage()


def test_of_a_good_secret_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    check_secret("gateway", ClusterConfig(cluster_secret="0123456789abcdef"))
    assert not caplog.records
