"""The adapters of all ranks of an engine: each has its part, in memory of its own.

    READ_ADAPTER   JSON: path, digest     answered, once it is in host memory: JSON: digest or error
    LOAD_ADAPTER   JSON: slot, digest     behind the steps that were sent before
    DROP_ADAPTER   JSON: digest

An adapter that one rank refuses none has.
"""

from __future__ import annotations

import json
import threading

from ...core.errors import AdapterRefused, BatonError
from ..lora.adapter_files import HostAdapter
from ..lora.rank_adapters import RankAdapters
from .rank_channel import MessageKind, RankChannel, RankMessage
from .rank_group import RankGroup


class RankedAdapters:
    """Rank 0's, in front of all."""

    def __init__(self, mine: RankAdapters, followers: RankGroup) -> None:
        self._mine, self._followers = mine, followers

    def read(self, path: str, digest: str = "") -> HostAdapter:
        """Of all ranks; on any thread but the watch's. Raises AdapterRefused."""
        found = self._mine.read(path, digest)
        payload = json.dumps({"path": path, "digest": found.digest}).encode()
        payloads = [payload] * self._followers.num_ranks
        _, answers = self._followers.order_and_wait(MessageKind.READ_ADAPTER, payloads)
        for rank, answer in enumerate(map(json.loads, answers), start=1):
            if "error" in answer:
                self._send(MessageKind.DROP_ADAPTER, digest=found.digest)
                raise AdapterRefused(f"rank {rank}: {answer['error']}")
        return found

    def keep(self, adapter: HostAdapter) -> None:
        """The others have theirs."""
        self._mine.keep(adapter)

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
    """Those of the engine whose rank 0 this is; None where none are served."""
    return mine if mine is None or followers is None else RankedAdapters(mine, followers)


class AdapterOrders:
    """Another rank's: files are read on a thread of their own, beside its steps."""

    def __init__(self, adapters: RankAdapters, channel: RankChannel) -> None:
        self._adapters, self._channel = adapters, channel

    def read(self, message: RankMessage) -> None:
        fields, order = json.loads(bytes(message.payload)), message.order

        def run() -> None:
            answer: dict[str, str] = {"digest": fields["digest"]}
            try:
                self._adapters.keep(self._adapters.read(fields["path"], fields["digest"]))
            except BatonError as error:
                answer = {"error": error.message}
            self._channel.send(MessageKind.ANSWER, json.dumps(answer).encode(), order=order)

        threading.Thread(target=run, name="read-adapter", daemon=True).start()

    def load(self, message: RankMessage) -> None:
        fields = json.loads(bytes(message.payload))
        self._adapters.load(fields["slot"], fields["digest"])

    def drop(self, message: RankMessage) -> None:
        self._adapters.drop(json.loads(bytes(message.payload))["digest"])
