"""What the workers of one gateway ask each other: their metrics, and to end calls by name.

    /metrics at any worker ── {"ask": "metrics"} over each other's unix socket ──► one exposition,
    every series with a label `worker`
One JSON line there, one back. The sockets lie in a folder that only this user enters; a worker that
is just starting, or does not answer in time, is left out.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ...security.worker_place import WorkerPlace
from .prometheus import Exporter

log = logging.getLogger(__name__)

_ANSWER_S = 1.0
_MAX_ANSWER_BYTES = 16 << 20


class WorkerPeers:
    """`exporter` has this worker's metrics; `abort(names, tenant)` ends its calls.

    Without a place there are no others.
    """

    def __init__(
        self,
        place: WorkerPlace | None,
        exporter: Exporter,
        abort: Callable[[Sequence[str], str | None], int],
    ) -> None:
        self._place = place
        self._exporter = exporter
        self._abort = abort
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to answer the others."""
        if self._place is not None:
            path = self._place.socket_of(self._place.index)
            path.unlink(missing_ok=True)  # of the process that had our place
            self._server = await asyncio.start_unix_server(
                self._answer, path, limit=_MAX_ANSWER_BYTES
            )

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """The exposition of all workers and its content type, in the format `accept` prefers."""
        if self._place is None:
            return self._exporter.render(accept)
        encode, content_type = choose_encoder(accept)
        found = {self._place.index: [*self._exporter.collect()]}
        for index, answer in await self._ask_others({"ask": "metrics"}):
            found[index] = [_family(parts) for parts in answer]
        return encode(_Families(_labelled(found))), content_type

    async def abort(self, names: Sequence[str], tenant: str | None) -> int:
        """End calls at all workers; returns how many ran."""
        num_own = self._abort(names, tenant)
        question = {"ask": "abort", "names": list(names), "tenant": tenant}
        return num_own + sum([int(answer) for _, answer in await self._ask_others(question)])

    # --- between workers --------------------------------------------------------------------------

    async def _ask_others(self, question: dict[str, Any]) -> list[tuple[int, Any]]:
        if self._place is None:
            return []
        others = self._place.others
        answers = await asyncio.gather(*(self._ask(index, question) for index in others))
        pairs = zip(others, answers, strict=True)
        return [(index, answer) for index, answer in pairs if answer is not None]

    async def _ask(self, index: int, question: dict[str, Any]) -> Any:
        assert self._place is not None
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(
                    self._place.socket_of(index), limit=_MAX_ANSWER_BYTES
                )
                try:
                    writer.write(json.dumps(question).encode() + b"\n")
                    return json.loads(await reader.readline())
                finally:
                    writer.close()
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("worker %d did not answer: %r", index, error)
            return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                question = json.loads(await reader.readline())
                if question["ask"] == "metrics":
                    answer: Any = [_parts(family) for family in self._exporter.collect()]
                else:
                    answer = self._abort(question["names"], question["tenant"])
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (OSError, TimeoutError):
            pass  # whoever asked is gone
        finally:
            writer.close()


class _Families(Collector):
    """Families that are there already, for an encoder. It asks for nothing but `collect`."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        yield from self._families


def _parts(family: Family) -> list[Any]:
    samples = [[sample.name, sample.labels, sample.value] for sample in family.samples]
    return [family.name, family.documentation, family.type, samples]


def _family(parts: list[Any]) -> Family:
    name, documentation, kind, samples = parts
    family = Family(name, documentation, kind)
    family.samples = [Sample(*sample) for sample in samples]
    return family


def _labelled(families: dict[int, list[Family]]) -> list[Family]:
    """One family for each name: all workers' samples, each with its worker's number."""
    merged: dict[str, Family] = {}
    for index, found in sorted(families.items()):
        for family in found:
            whole = merged.setdefault(
                family.name, Family(family.name, family.documentation, family.type)
            )
            whole.samples += [
                sample._replace(labels={**sample.labels, "worker": str(index)})
                for sample in family.samples
            ]
    return list(merged.values())
