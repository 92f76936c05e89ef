"""A peer with the key passes the handshake; a peer without it does not, whether it replays, alters
or mixes messages.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time

import pytest

from baton.core.channels.handshake import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    OPENING_BYTES,
    Dialer,
    Listener,
    Opening,
    key_id,
)
from baton.core.errors import Unauthenticated

KEY, OTHER_KEY = os.urandom(32), os.urandom(32)
GATEWAY, ENGINE, OTHER_ENGINE = "aa" * 16, "bb" * 16, "cc" * 16
ADDRESS, OTHER_ADDRESS = "10.0.0.1:5000", "10.0.0.1:5001"


def dialer(
    key: bytes = KEY,
    purpose: bytes = b"session",
    *,
    listener: str = ENGINE,
    address: str = ADDRESS,
) -> Dialer:
    return Dialer(key, purpose, dialer=GATEWAY, listener=listener, address=address)


def listener(
    key: bytes = KEY, purpose: bytes = b"session", engine: str = ENGINE, address: str = ADDRESS
) -> Listener:
    return Listener(
        lambda opening: key if opening.listener == engine else None, purpose, (address,)
    )


def test_two_ends_with_the_same_key_know_each_other() -> None:
    ours, theirs = dialer(), listener()
    opening = theirs.check(ours.answer(theirs.challenge(ours.opening), b"said"), b"said")
    assert (opening.dialer, opening.listener, opening.purpose) == (GATEWAY, ENGINE, b"session")


def test_messages_have_fixed_sizes_and_never_repeat() -> None:
    ours, theirs = dialer(), listener()
    challenge = theirs.challenge(ours.opening)
    sizes = (len(ours.opening), len(challenge), len(ours.answer(challenge)))
    assert sizes == (OPENING_BYTES, CHALLENGE_BYTES, ANSWER_BYTES)
    assert dialer().opening != ours.opening
    assert listener().challenge(ours.opening) != challenge
    assert KEY not in ours.opening + challenge + ours.answer(challenge)


@pytest.mark.parametrize(
    "theirs",
    [
        listener(purpose=b"handoff"),
        listener(engine=OTHER_ENGINE),
        listener(address=OTHER_ADDRESS),
    ],
    ids=["purpose", "incarnation", "address"],
)
def test_a_listener_refuses_what_was_meant_for_another(theirs: Listener) -> None:
    with pytest.raises(Unauthenticated):
        theirs.challenge(dialer().opening)


def test_a_listener_proves_nothing_where_another_key_is_meant() -> None:
    theirs = listener()
    with pytest.raises(Unauthenticated, match="does not hold the key"):
        theirs.challenge(dialer(OTHER_KEY).opening)
    with pytest.raises(Unauthenticated, match="before an opening"):
        theirs.check(os.urandom(ANSWER_BYTES))


def test_each_end_finds_out_that_the_other_has_another_key() -> None:
    """Either end detects a different key, even if the other claims the id of the right one."""
    ours, theirs, liar = dialer(), listener(), dialer(OTHER_KEY)
    opening = dataclasses.replace(Opening.unpack(liar.opening), key_id=key_id(KEY)).pack()
    liar.opening = opening
    with pytest.raises(Unauthenticated):
        liar.answer(theirs.challenge(opening))
    with pytest.raises(Unauthenticated):
        theirs.check(os.urandom(ANSWER_BYTES))
    impostor = Listener(lambda _: OTHER_KEY, b"session", (ADDRESS,))
    claimed = dataclasses.replace(Opening.unpack(ours.opening), key_id=key_id(OTHER_KEY)).pack()
    with pytest.raises(Unauthenticated):
        ours.answer(impostor.challenge(claimed))


def test_nothing_recorded_passes_again() -> None:
    ours, theirs = dialer(), listener()
    challenge = theirs.challenge(ours.opening)
    answer = ours.answer(challenge)
    theirs.check(answer)
    with pytest.raises(Unauthenticated, match="before an opening"):
        theirs.check(answer)
    again = listener()
    again.challenge(ours.opening)
    with pytest.raises(Unauthenticated):
        again.check(answer)
    with pytest.raises(Unauthenticated):
        dialer().answer(challenge)


def test_a_relay_at_another_address_is_of_no_use() -> None:
    """A relay that listens at a dead engine's address and forwards to a live engine is refused."""
    ours = dialer(address=OTHER_ADDRESS)
    with pytest.raises(Unauthenticated, match="address"):
        listener().challenge(ours.opening)


def test_a_proof_cannot_be_turned_back() -> None:
    """A listener's proof does not pass as a dialer's: the direction is part of it."""
    theirs = listener()
    challenge = theirs.challenge(dialer().opening)
    for proof in (challenge[:ANSWER_BYTES], challenge[-ANSWER_BYTES:]):
        theirs = listener()
        theirs.challenge(dialer().opening)
        with pytest.raises(Unauthenticated):
            theirs.check(proof)


def test_what_goes_with_the_answer_is_proven_too() -> None:
    ours, theirs = dialer(), listener()
    answer = ours.answer(theirs.challenge(ours.opening), b"blocks 1 to 3")
    with pytest.raises(Unauthenticated):
        theirs.check(answer, b"blocks 1 to 4")


def mutated(message: bytes, chance: random.Random) -> bytes:
    """The message with some bytes changed, lost, inserted or replaced; never the same message."""
    bent = bytearray(message)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(bent) + 1)
        match chance.randrange(4):
            case 0 if at < len(bent):
                bent[at] ^= chance.randint(1, 255)
            case 1:
                bent[at:at] = chance.randbytes(chance.randint(1, 8))
            case 2:
                del bent[at : at + chance.randint(1, 8)]
            case _:
                bent = bytearray(chance.randbytes(len(bent)))
    return bytes(bent) if bytes(bent) != message else message + b"\0"


def run_mutants(num_mutants: int, seed: int) -> int:
    """Alter one of the three messages of each handshake; returns how many still passed."""
    chance, num_passed = random.Random(seed), 0
    for _ in range(num_mutants):
        ours, theirs = dialer(), listener()
        bent = chance.randrange(3)
        try:
            opening = mutated(ours.opening, chance) if bent == 0 else ours.opening
            challenge = theirs.challenge(opening)
            challenge = mutated(challenge, chance) if bent == 1 else challenge
            answer = ours.answer(challenge)
            theirs.check(mutated(answer, chance) if bent == 2 else answer)
            num_passed += 1
        except Unauthenticated:
            continue
    return num_passed


def test_mutants_neither_pass_nor_crash() -> None:
    assert run_mutants(20_000, seed=1) == 0


@pytest.mark.slow
def test_a_million_mutants_neither_pass_nor_crash() -> None:
    assert run_mutants(1_000_000, seed=2) == 0


def test_random_bytes_are_no_opening() -> None:
    chance = random.Random(3)
    for _ in range(2000):
        with pytest.raises(Unauthenticated):
            Opening.unpack(chance.randbytes(chance.randint(0, 2 * OPENING_BYTES)))


def test_a_handshake_takes_far_less_than_a_millisecond_of_cpu() -> None:
    began_s = time.process_time()
    for _ in range(1000):
        ours, theirs = dialer(), listener()
        theirs.check(ours.answer(theirs.challenge(ours.opening)))
    assert time.process_time() - began_s < 1.0
