"""The prefix cache of one engine as stored in Redis: pages of blocks, and their table of contents.

    contents   incarnation, number of the last delta in the pages, number of pages, of blocks
    page i     header | hash 0 | hash 1 | ... | tier 0 | tier 1 | ...      17 bytes per block

A block keeps its place while it is cached in any tier, and the place that was freed last is taken
first, so that what a step evicts and stores changes few pages. A free place is all zeros. Any other
bytes raise BadMessage and nothing else.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import msgspec

from ..core.membership import HexId
from ..core.request.token_ids import HASH_BYTES, BlockHash, Tier
from .messages import BadMessage, Count

PAGE_BLOCKS = 960  # with header and seal 16 KiB, a size of Redis' allocator
_HEADER = struct.Struct("<8s16sII")  # magic, incarnation, index, Unix time of the write
_MAGIC = b"BATONIX1"
MAX_PAGE_BYTES = _HEADER.size + PAGE_BLOCKS * (HASH_BYTES + 1)
_MOST_PAGES = (1 << 32) // PAGE_BLOCKS
_FREE = bytes(HASH_BYTES)
_hash_at = struct.Struct(f"{HASH_BYTES}s").iter_unpack


class Contents(msgspec.Struct, frozen=True, array_like=True, tag="contents 1"):
    """The pages have all changes up to delta `seq`, and perhaps some later ones. Blocks: on the
    device, and in host memory only. `unix_s`: time of the write."""

    incarnation: HexId
    seq: Count
    num_pages: Count
    device_blocks: Count
    host_blocks: Count
    unix_s: Count


class Page(NamedTuple):
    """`hashes`: of all blocks on the page; `in_host`: those of them in host memory only."""

    hashes: Sequence[BlockHash]
    in_host: Sequence[BlockHash]
    unix_s: int


_contents_decoder = msgspec.msgpack.Decoder(Contents)
encode_contents = msgspec.msgpack.Encoder().encode


def decode_contents(raw: bytes, incarnation: str) -> Contents:
    """Decode the contents of this engine; raises BadMessage, also if empty."""
    try:
        contents = _contents_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from error
    if contents.incarnation != incarnation or contents.num_pages > _MOST_PAGES:
        raise BadMessage("no contents of this engine")
    return contents


def decode_page(raw: bytes, incarnation: str, index: int) -> Page:
    """Decode the page of this engine with this index; raises BadMessage, also if empty."""
    num_blocks, rest = divmod(len(raw) - _HEADER.size, HASH_BYTES + 1)
    if not 0 <= num_blocks <= PAGE_BLOCKS or rest:
        raise BadMessage(f"a page of {len(raw)} bytes")
    magic, owner, number, unix_s = _HEADER.unpack_from(raw)
    if (magic, owner, number) != (_MAGIC, bytes.fromhex(incarnation), index):
        raise BadMessage("not this page")
    end = _HEADER.size + num_blocks * HASH_BYTES
    tiers = raw[end:]
    hashes = [BlockHash(each) for (each,) in _hash_at(memoryview(raw)[_HEADER.size : end])]
    in_host: list[BlockHash] = []
    if Tier.HOST in tiers:
        in_host = [*compress(hashes, [tier == Tier.HOST for tier in tiers])]
    if Tier.NOWHERE in tiers:
        hashes = [*compress(hashes, tiers)]
    return Page(hashes, in_host, unix_s)


class StoredBlocks:
    """The blocks of one engine, by page. `changed`: pages that differ from those in Redis; the
    writer removes them."""

    def __init__(self, incarnation: str) -> None:
        self.changed: set[int] = set()
        self._owner = bytes.fromhex(incarnation)
        self._place_of: dict[BlockHash, int] = {}
        self._free: list[int] = []  # a stack
        self._hashes: list[bytearray] = []  # by page
        self._tiers: list[bytearray] = []
        self._counts: Counter[Tier] = Counter()

    @property
    def num_pages(self) -> int:
        return len(self._hashes)

    def tier(self, block_hash: BlockHash) -> Tier:
        """The best tier that the block is in."""
        place = self._place_of.get(block_hash)
        if place is None:
            return Tier.NOWHERE
        page, slot = divmod(place, PAGE_BLOCKS)
        return Tier(self._tiers[page][slot])

    def move(self, block_hash: BlockHash, was: Tier, now: Tier) -> None:
        """Move a block from tier `was`, which is its tier, to `now`, another one."""
        if was is Tier.NOWHERE:
            place = self._place_of[block_hash] = self._free.pop() if self._free else self._add()
        elif now is Tier.NOWHERE:
            place = self._place_of.pop(block_hash)
            self._free.append(place)
        else:
            place = self._place_of[block_hash]
        page, slot = divmod(place, PAGE_BLOCKS)
        self._tiers[page][slot] = now
        if was is Tier.NOWHERE or now is Tier.NOWHERE:
            start = slot * HASH_BYTES
            self._hashes[page][start : start + HASH_BYTES] = block_hash if now else _FREE
        self._counts[was] -= 1
        self._counts[now] += 1
        self.changed.add(page)

    def _add(self) -> int:
        """Append a place."""
        if not self._tiers or len(self._tiers[-1]) == PAGE_BLOCKS:
            self._hashes.append(bytearray())
            self._tiers.append(bytearray())
        self._hashes[-1] += _FREE
        self._tiers[-1].append(0)
        return (len(self._tiers) - 1) * PAGE_BLOCKS + len(self._tiers[-1]) - 1

    def count(self, tier: Tier) -> int:
        """The number of blocks whose best tier this is."""
        return self._counts[tier]

    def encode(self, pages: Iterable[int], unix_s: int) -> Iterator[tuple[int, bytes]]:
        """Each page's index and bytes."""
        for page in pages:
            header = _HEADER.pack(_MAGIC, self._owner, page, unix_s & 0xFFFF_FFFF)
            yield page, b"".join((header, self._hashes[page], self._tiers[page]))
