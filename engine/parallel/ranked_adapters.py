"""The LoRA adapters of all ranks of an engine: each rank has its part in its own memory.

    READ_ADAPTER     JSON: path, digest     answered once the files are read: JSON, digest or error
    KEEP_ADAPTER     JSON: order            keep in host memory the adapter read by that order
    FORGET_ADAPTER   JSON: order            or discard it
    LOAD_ADAPTER     JSON: slot, digest     after the steps that were sent before
    DROP_ADAPTER     JSON: digest

If one rank refuses an adapter, no rank keeps it. Changes of host memory are sent by rank 0's engine
thread, so that all ranks have the same adapters whenever a slot is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading

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
        payload = json.dumps({"path": path, "digest": found.digest}).encode()
        payloads = [payload] * self._followers.num_ranks
        order, answers = self._followers.order_and_wait(MessageKind.READ_ADAPTER, payloads)
        found = dataclasses.replace(found, order=order)
        for rank, answer in enumerate(map(json.loads, answers), start=1):
            if "error" in answer:
                self.forget(found)
                raise AdapterRefused(f"rank {rank}: {answer['error']}")
        return found

    def keep(self, adapter: HostAdapter) -> None:
        self._send(MessageKind.KEEP_ADAPTER, order=adapter.order)
        self._mine.keep(adapter)

    def forget(self, adapter: HostAdapter) -> None:
        self._send(MessageKind.FORGET_ADAPTER, order=adapter.order)

    def drop(self, digest: str) -> None:
        self._send(MessageKind.DROP_ADAPTER, digest=digest)
        self._mine.drop(digest)

    def load(self, slot: int, digest: str) -> None:
        self._send(MessageKind.LOAD_ADAPTER, digest=digest, slot=slot)
        self._mine.load(slot, digest)

    def _send(self, kind: MessageKind, **fields: object) -> None:
        self._followers.send(kind, json.dumps(fields).encode())


def adapters_of(
    mine: RankAdapters | None, followers: RankGroup | None
) -> RankAdapters | RankedAdapters | None:
    """The adapters of all ranks; `mine`: rank 0's, None if no adapters are served."""
    return mine if mine is None or followers is None else RankedAdapters(mine, followers)


class AdapterOrders:
    """Runs rank 0's adapter orders on another rank. Files are read on a thread of their own, beside
    the steps; a read adapter is kept apart until rank 0 sends KEEP_ADAPTER or FORGET_ADAPTER."""

    def __init__(self, adapters: RankAdapters, channel: RankChannel) -> None:
        self._adapters, self._channel = adapters, channel
        self._read: dict[int, HostAdapter] = {}  # by order

    def read(self, message: RankMessage) -> None:
        fields, order = json.loads(bytes(message.payload)), message.order

        def run() -> None:
            answer: dict[str, str] = {"digest": fields["digest"]}
            try:
                self._read[order] = self._adapters.read(fields["path"], fields["digest"])
            except BatonError as error:
                answer = {"error": error.message}
            except Exception as error:  # on this thread: rank 0 would wait for ever
                log.exception("the adapter at %s cannot be read", fields["path"])
                answer = {"error": f"{type(error).__name__}: {error}"}
            self._channel.answer(order, json.dumps(answer).encode())

        threading.Thread(target=run, name="read-adapter", daemon=True).start()

    def keep(self, message: RankMessage) -> None:
        self._adapters.keep(self._read.pop(json.loads(bytes(message.payload))["order"]))

    def forget(self, message: RankMessage) -> None:
        """Discard a read adapter; if this rank refused it, there is nothing to discard."""
        self._read.pop(json.loads(bytes(message.payload))["order"], None)

    def load(self, message: RankMessage) -> None:
        fields = json.loads(bytes(message.payload))
        self._adapters.load(fields["slot"], fields["digest"])

    def drop(self, message: RankMessage) -> None:
        self._adapters.drop(json.loads(bytes(message.payload))["digest"])
