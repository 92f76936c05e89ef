"""The LoRA adapters of all ranks of an engine: each rank has its part in its own memory.

    ADAPTER, JSON      "do"      and
                       read      path, digest    answered once the files are read: digest or error
                       keep      order           keep in host memory the adapter that it read
                       forget    order           or discard it
                       load      slot, digest    after the steps that were sent before
                       drop      digest

If one rank refuses an adapter, no rank keeps it. Changes of host memory are sent by rank 0's engine
thread, so that all ranks have the same adapters whenever a slot is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from functools import partial

from ...core.errors import AdapterRefused, BatonError
from ..lora.adapter_files import HostAdapter
from ..lora.rank_adapters import RankAdapters
from .rank_channel import MessageKind, RankChannel, RankMessage
from .rank_group import RankGroup

log = logging.getLogger(__name__)


class RankedAdapters:
    """Rank 0's RankAdapters, which also sends each operation to the other ranks."""

    def __init__(self, mine: RankAdapters, followers: RankGroup) -> None:
        self._mine, self._followers = mine, followers

    def read(self, path: str, digest: str = "") -> HostAdapter:
        """Read it on all ranks; on any thread but the watch thread. Raises AdapterRefused."""
        found = self._mine.read(path, digest)
        payload = json.dumps({"do": "read", "path": path, "digest": found.digest}).encode()
        order, answers = self._followers.order_and_wait(MessageKind.ADAPTER, payload)
        found = dataclasses.replace(found, order=order)
        for rank, answer in enumerate(map(json.loads, answers), start=1):
            if "error" in answer:
                self.forget(found)
                raise AdapterRefused(f"rank {rank}: {answer['error']}")
        return found

    def keep(self, adapter: HostAdapter) -> None:
        self._send("keep", order=adapter.order)
        self._mine.keep(adapter)

    def forget(self, adapter: HostAdapter) -> None:
        self._send("forget", order=adapter.order)

    def drop(self, digest: str) -> None:
        self._send("drop", digest=digest)
        self._mine.drop(digest)

    def load(self, slot: int, digest: str) -> None:
        self._send("load", digest=digest, slot=slot)
        self._mine.load(slot, digest)

    def _send(self, do: str, **fields: object) -> None:
        self._followers.send(MessageKind.ADAPTER, json.dumps({"do": do, **fields}).encode())


class AdapterOrders:
    """Runs rank 0's adapter orders on another rank. Files are read on a thread of their own, beside
    the steps; a read adapter is kept apart until rank 0 lets it be kept or forgotten."""

    def __init__(self, adapters: RankAdapters, channel: RankChannel) -> None:
        self._adapters, self._channel = adapters, channel
        self._read: dict[int, HostAdapter] = {}  # by order

    def run(self, message: RankMessage) -> None:
        match json.loads(bytes(message.payload)):
            case {"do": "read", "path": path, "digest": digest}:
                run = partial(self._answer_read, message.order, path, digest)
                threading.Thread(target=run, name="read-adapter", daemon=True).start()
            case {"do": "keep", "order": order}:
                self._adapters.keep(self._read.pop(order))
            case {"do": "forget", "order": order}:
                self._read.pop(order, None)  # absent if this rank refused it
            case {"do": "load", "slot": slot, "digest": digest}:
                self._adapters.load(slot, digest)
            case {"do": "drop", "digest": digest}:
                self._adapters.drop(digest)
            case other:
                raise ValueError(f"an order for adapters that is none: {other}")

    def _answer_read(self, order: int, path: str, digest: str) -> None:
        answer = {"digest": digest}
        try:
            self._read[order] = self._adapters.read(path, digest)
        except BatonError as error:
            answer = {"error": error.message}
        except Exception as error:  # on this thread: rank 0 would wait for ever
            log.exception("the adapter at %s cannot be read", path)
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._channel.answer(order, json.dumps(answer).encode())
