"""Blocks in slots of a file: a read returns what was written, or a reason why not."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.tiers.disk import Fault, MemoryFile, memory_disk
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import StartupFailed
from baton.core.request.token_ids import BlockHash
from baton.engine.kv.disk import disk_file
from baton.engine.kv.disk.disk_file import PAGE, OsFile, SlotFile, open_slots, slot_bytes_of

BLOCK = 5000
SLOT = slot_bytes_of(BLOCK)


def block_of(n: int) -> bytearray:
    return bytearray((n + i * 7) % 251 for i in range(BLOCK))


def hash_of(n: int) -> BlockHash:
    return BlockHash(n.to_bytes(16, "little"))


def slots_over(file: MemoryFile, fingerprint: str = "model") -> SlotFile:
    return SlotFile(file, 4, BLOCK, fingerprint)


def read(slots: SlotFile, slot: int, n: int) -> bytes | None:
    block = bytearray(BLOCK)
    return None if slots.read(slot, hash_of(n), memoryview(block)) else bytes(block)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from(Fault))))
def test_a_slot_has_what_was_written_last_or_nothing(
    writes: list[tuple[int, int, Fault]],
) -> None:
    file = memory_disk(4, BLOCK)
    slots, written = slots_over(file), dict[int, int]()
    for slot, n, fault in writes:
        file.draw = lambda fault=fault: fault
        failure = slots.write(slot, hash_of(n), memoryview(block_of(n)))
        assert (failure is None) == (fault in (Fault.NONE, Fault.DAMAGE))
        if fault is Fault.NONE:
            written[slot] = n
        elif fault in (Fault.SHORT, Fault.DAMAGE):
            written.pop(slot, None)
    file.draw = lambda: Fault.NONE
    for slot in range(4):
        for n in range(10):
            expected = bytes(block_of(n)) if written.get(slot) == n else None
            assert read(slots, slot, n) == expected


HEADER_FIELDS = (0, 8, 12, 20, 36, 52)  # magic, format, length, fingerprint, hash, checksum


@pytest.mark.parametrize("place", [*HEADER_FIELDS, 55, 56, PAGE - 1, PAGE, PAGE + BLOCK - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_damage_anywhere_is_found(place: int, bit: int) -> None:
    file = memory_disk(4, BLOCK)
    slots = slots_over(file)
    assert slots.write(1, hash_of(5), memoryview(block_of(5))) is None
    assert read(slots, 1, 5) == block_of(5)
    file.content[SLOT + place] ^= 1 << bit
    assert read(slots, 1, 5) is None


@given(st.integers(0, PAGE + BLOCK - 1), st.integers(1, 255), st.integers(1, 3000))
def test_damaged_ranges_are_found(first: int, mask: int, length: int) -> None:
    file = memory_disk(4, BLOCK)
    slots = slots_over(file)
    slots.write(0, hash_of(5), memoryview(block_of(5)))
    for place in range(first, min(first + length, PAGE + BLOCK)):
        file.content[place] ^= mask
    assert read(slots, 0, 5) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda pages: [pages[1], pages[0], pages[2]],
        lambda pages: [pages[0], bytes(PAGE), pages[2]],
        lambda pages: [pages[0], pages[0], pages[2]],
        lambda pages: [pages[0][8:] + pages[0][:8], *pages[1:]],
        lambda pages: [pages[0][4000:] + pages[0][:4000], *pages[1:]],
        lambda pages: [bytes(PAGE)] * 3,
    ],
)
def test_pages_and_words_that_moved_are_found(
    damage: Callable[[list[bytes]], list[bytes]],
) -> None:
    file = memory_disk(1, 3 * PAGE)
    slots = SlotFile(file, 1, 3 * PAGE, "model")
    block = random.Random(3).randbytes(3 * PAGE)
    slots.write(0, hash_of(1), memoryview(block))
    assert slots.read(0, hash_of(1), memoryview(bytearray(3 * PAGE))) is None
    pages = [block[first : first + PAGE] for first in range(0, 3 * PAGE, PAGE)]
    file.content[PAGE : 4 * PAGE] = b"".join(damage(pages))
    assert slots.read(0, hash_of(1), memoryview(bytearray(3 * PAGE)))


def test_a_block_of_another_prompt_model_or_slot_is_none() -> None:
    file = memory_disk(4, BLOCK)
    slots = slots_over(file)
    slots.write(0, hash_of(5), memoryview(block_of(5)))
    assert read(slots, 0, 6) is None
    assert read(slots, 1, 5) is None
    assert read(slots_over(file, "another"), 0, 5) is None
    file.content[SLOT : 2 * SLOT] = file.content[:SLOT]
    assert read(slots, 1, 5) == block_of(5), "the same prompt's block is the same anywhere"


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.NO_ROOM, Fault.SHORT])
def test_what_goes_wrong_is_told(fault: Fault) -> None:
    file = memory_disk(4, BLOCK)
    slots = slots_over(file)
    file.draw = lambda: fault
    assert slots.write(0, hash_of(5), memoryview(block_of(5)))
    assert slots.read(0, hash_of(5), memoryview(bytearray(BLOCK)))


# -- in a directory -------------------------------------------------------------------------------


def test_a_real_file(tmp_path: Path) -> None:
    slots = open_slots(str(tmp_path), 3 * SLOT + 1, BLOCK, "model")
    assert slots.num_slots == 3
    for n in range(3):
        assert slots.write(n, hash_of(n), memoryview(block_of(n))) is None
    assert slots.settle() is None
    assert [read(slots, n, n) for n in range(3)] == [*map(block_of, range(3))]
    assert not [*tmp_path.iterdir()], "it has no name"
    slots.close()


@pytest.mark.parametrize("name", ["absent", "file"])
def test_a_directory_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupFailed, match=f"--kv-disk-path .*{name}"):
        open_slots(str(tmp_path / name), 3 * SLOT, BLOCK, "model")


def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(disk_file.tempfile, "TemporaryFile", refuse)
    with pytest.raises(StartupFailed, match="Permission denied"):
        open_slots(str(tmp_path), 3 * SLOT, BLOCK, "model")


def num_slots_of(directory: Path) -> int:
    """The number of slots in `directory`, of 100 requested."""
    with contextlib.closing(open_slots(str(directory), 100 * SLOT, BLOCK, "model")) as slots:
        return slots.num_slots


def test_where_there_is_less_room_there_are_fewer_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(OsFile, "free_bytes", 20 * SLOT)
    monkeypatch.setattr(OsFile, "allocate", lambda file, num_bytes: None)
    with caplog.at_level(logging.WARNING):
        assert num_slots_of(tmp_path) == 19
    assert "is full" in caplog.text
    monkeypatch.setattr(OsFile, "free_bytes", SLOT)  # of which a twentieth stays free
    with pytest.raises(StartupFailed, match="no room for a KV block"):
        open_slots(str(tmp_path), 100 * SLOT, BLOCK, "model")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_room_that_another_took_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def allocate(file: OsFile, num_bytes: int) -> None:
        if num_bytes > 20 * SLOT:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(OsFile, "allocate", allocate)
    assert num_slots_of(tmp_path) == 12


def test_a_killed_engine_leaves_nothing_and_a_live_one_is_not_disturbed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from baton.engine.kv.disk.disk_file import open_slots; "
        f"slots = open_slots({str(tmp_path)!r}, {64 * SLOT}, {BLOCK}, 'model'); "
        "print('open', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdin is not None
    assert other.stdout.readline() == b"open\n"
    mine = open_slots(str(tmp_path), 3 * SLOT, BLOCK, "model")
    mine.write(1, hash_of(1), memoryview(block_of(1)))
    other.send_signal(signal.SIGKILL)
    other.wait()
    other.stdin.close()
    other.stdout.close()
    assert not [*tmp_path.iterdir()]
    assert read(mine, 1, 1) == block_of(1)
    mine.close()
