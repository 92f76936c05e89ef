"""One fault on a real cluster: the streams affected, and the conditions after recovery.

    Stream     one request as its client sees it
    Reference  the output of one process alone
    Scene      finds the node to break by its ledger, breaks it, then checks O1 to O5:
                 O1 every stream ends                       O4 no process, socket, descriptor left
                 O2 its tokens are the reference's, whole   O5 or the error that was expected
                 O3 every ledger is idle and balanced

The phase of a request is observed from outside, by a node's ledger or by the client's stream, and
held where needed by pausing a process: the product has no switch for tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import torch
from engines.generation import outputs_of
from fault_scenes.fault_cluster import MODEL, Cluster
from node_driver import SECRET, abstract_sockets, is_idle

from baton.cli.cluster.survey import ask_ledgers
from baton.client import AsyncClient, AsyncGeneration, Result
from baton.cluster.secret import ClusterSecret
from baton.core.engine_config import EngineConfig
from baton.core.errors import BatonError
from baton.core.request.request import Request, token_key
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.timeline import Event
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine
from baton.kernels.sampling.logit_adjustment import filter_logits
from baton.kernels.sampling.sampling import as_signed, gumbel_noise
from baton.proto.v1 import node_pb2_grpc

BLOCK_SIZE = 16
PATIENCE_S = 40.0
NEAR_TIE = 1e-4  # of two scores: a hundred times the effect of rounding
VOCAB_SIZE: int = MODEL["vocab_size"]
SPARE_FDS = 10  # connections come and go, and are closed lazily

Ledger = dict[str, Any]


class Reference:
    """The output of one process alone, in float32."""

    def __init__(self, model_dir: Path) -> None:
        config = EngineConfig(
            model=str(model_dir), load_format="dummy", device="cpu", enable_prefix_caching=False
        )
        self.model_dir = model_dir
        self._local = LocalEngine(config, ModelRunner(config))

    def tokens(self, streams: Sequence[Stream]) -> list[list[int]]:
        """The expected tokens of each stream; of one that ends with an error, as many as it
        received."""
        requests = [self._request(stream) for stream in streams]
        outputs = outputs_of(self._local, requests)
        return [outputs[request.key] for request in requests]

    def num_near_ties(self, stream: Stream, expected: list[int]) -> int:
        """Fail unless the stream has the expected tokens; returns how often it took a tied token.

        Batches of other shapes round differently: a score moves by about 1e-6, and about once in
        100,000 tokens that exchanges the best two. The expected continuation is then that of the
        stream's own token. Any other difference fails.
        """
        num_ties = 0
        while stream.tokens != (wanted := expected[: len(stream.tokens)]):
            index = next(i for i, token in enumerate(wanted) if token != stream.tokens[i])
            margin = self.margin(stream, index)
            assert margin < NEAR_TIE, (
                f"token {index} is behind by {margin:.1e}\n got {stream.tokens}\nwant {expected}"
            )
            print(f"near-tie: token {index} is behind by {margin:.1e}")
            num_ties += 1
            expected = [*stream.tokens[: index + 1], *self.rest(stream, index + 1)]
        return num_ties

    def margin(self, stream: Stream, index: int) -> float:
        """How far the score of the stream's token is below the best one."""
        sampling = replace(stream.sampling, max_tokens=index + 1, logprobs=VOCAB_SIZE)
        request = replace(self._request(stream, index), sampling=sampling)
        self._local.engine.add(request)
        while not (tokens := self._local.engine.step().tokens):
            pass
        logits = torch.full((1, VOCAB_SIZE), -torch.inf)
        for token_id, logprob in tokens[0].top:
            logits[0, token_id] = logprob
        if sampling.temperature > 0:
            key = token_key(sampling.seed, 0, len(stream.prompt) + index)
            logits = filter_logits(
                logits / sampling.temperature,
                torch.tensor([VOCAB_SIZE]),
                torch.tensor([sampling.top_p]),
            ) + gumbel_noise(torch.tensor([as_signed(key)]), VOCAB_SIZE)
        return float(logits.max() - logits[0, stream.tokens[index]])

    def rest(self, stream: Stream, num_known: int) -> list[int]:
        """The expected tokens after the stream's first `num_known` tokens."""
        if num_known == stream.num_due:
            return []
        request = self._request(stream, num_known)
        return outputs_of(self._local, [request])[request.key]

    def _request(self, stream: Stream, num_known: int = 0) -> Request:
        return Request(
            f"{random.getrandbits(128):032x}",
            0,
            stream.prompt,
            replace(stream.sampling, max_tokens=stream.num_due),
            tuple(stream.tokens[:num_known]),
        )


@dataclass
class Stream:
    """One request as its client sees it.

    `expected_error` must occur. With `may_fail` any typed error may occur.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    generation: AsyncGeneration
    expected_error: type[BatonError] | None = None
    may_fail: bool = False
    tokens: list[int] = field(default_factory=list)
    error: BatonError | None = None
    reading: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        try:
            async for chunk in self.generation:
                self.tokens += chunk.token_ids
                self._changed.set()
        except BatonError as error:
            self.error = error
        self._changed.set()

    @property
    def is_over(self) -> bool:
        return self.reading is not None and self.reading.done()

    @property
    def num_due(self) -> int:
        """Number of tokens to compare with the reference; at least one, as the reference is a
        request too."""
        if self.expected_error is None:
            return self.sampling.max_tokens
        return max(1, len(self.tokens))

    @property
    def result(self) -> Result:
        assert self.error is None, f"{type(self.error).__name__}: {self.error}"
        return self.generation.result

    async def reached(self, num_tokens: int) -> None:
        """Wait until that many tokens have arrived."""
        while len(self.tokens) < num_tokens:
            assert not self.is_over, f"over after {len(self.tokens)} tokens: {self.error}"
            self._changed.clear()
            await self._changed.wait()

    async def end(self) -> None:
        assert self.reading is not None
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.shield(self.reading)

    def routed_s(self) -> list[float]:
        """The times of the gateway's dispatches; unix seconds."""
        stamps = self.result.timeline
        return [s.unix_ns / 1e9 for s in stamps if s.event is Event.ROUTED]


class Scene:
    """One fault on a healthy cluster. `async with`; the body breaks something, then `check`."""

    def __init__(self, cluster: Cluster, reference: Reference) -> None:
        self.cluster = cluster
        self.reference = reference
        self.streams: list[Stream] = []
        self.num_near_ties = 0
        self.broken_s = 0.0  # when the fault happened, unix seconds
        self.names: dict[str, str] = {}  # of nodes, by incarnation
        self._clients: dict[str, AsyncClient] = {}  # by address
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Scene:
        await self.heal()
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self.streams:
            assert stream.reading is not None
            stream.generation.cancel()
            await stream.reading
        for each in (*self._channels.values(), *self._clients.values()):
            await each.close()

    def client(self, gateway: str = "gateway-0") -> AsyncClient:
        address = self.cluster.processes[gateway].address
        if address not in self._clients:
            self._clients[address] = AsyncClient(address)
        return self._clients[address]

    def incarnation(self, name: str) -> str:
        """The incarnation of a node's engine before the fault."""
        return next(each for each, node in self.names.items() if node == name)

    # --- faults -----------------------------------------------------------------------------------

    def kill(self, name: str, part: str = "node") -> None:
        """`Cluster.kill`, and record the time."""
        self.broken_s = time.time()
        self.cluster.kill(name, part)

    @contextmanager
    def stopped(self, name: str, part: str = "node") -> Iterator[None]:
        """`Cluster.stopped`, and record the time."""
        self.broken_s = time.time()
        with self.cluster.stopped(name, part):
            yield

    async def pause(self, name: str, seconds: float, part: str = "node") -> None:
        """Stop a process for a while."""
        with self.stopped(name, part):
            await asyncio.sleep(seconds)

    # --- requests ---------------------------------------------------------------------------------

    def ask(
        self,
        num_prompt_tokens: int = 100,
        num_tokens: int = 24,
        *,
        prompt: tuple[int, ...] | None = None,
        client: AsyncClient | None = None,
        gateway: str = "gateway-0",
        expected_error: type[BatonError] | None = None,
        may_fail: bool = False,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Stream:
        """Start a request, greedy by default, with a prompt that was not used before."""
        if prompt is None:
            prompt = tuple(random.choices(range(3, 320), k=num_prompt_tokens))
        settings = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True} | sampling
        fields = dict(settings)
        if constraint := fields.pop("constraint", None):
            fields[constraint.kind.value] = constraint.source
        generation = (client or self.client(gateway)).generate(
            prompt_token_ids=prompt, timeout_s=timeout_s, **fields
        )
        params = SamplingParams(**settings)
        stream = Stream(prompt, params, generation, expected_error, may_fail)
        stream.reading = asyncio.create_task(stream.read())
        self.streams.append(stream)
        return stream

    # --- observation ------------------------------------------------------------------------------

    async def ledger(self, name: str) -> Ledger:
        """The ledger of a node's engine. Raises AioRpcError while the node is away."""
        address = self.cluster.processes[name].address
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address)
        stub = node_pb2_grpc.NodeStub(self._channels[address])
        async with asyncio.timeout(2):
            ledgers = await ask_ledgers(stub, ClusterSecret(SECRET), address)
        found: Ledger = json.loads(ledgers[0]) if ledgers else {"error": "no engine"}
        return found

    async def holder(self, role: str, holds: Callable[[Ledger], bool]) -> str:
        """The first node of this role for whose ledger `holds` is true; waits for one."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if name := await self._look(role, holds):
                    return name

    async def holder_during(
        self, stream: Stream, role: str, holds: Callable[[Ledger], bool]
    ) -> str | None:
        """The same for a moment of this stream; None if the moment was missed."""
        while not stream.is_over:
            if name := await self._look(role, holds):
                return name
        return None

    async def _look(self, role: str, holds: Callable[[Ledger], bool]) -> str | None:
        for name in self.cluster.nodes(role):
            if holds(await self.ledger(name)):
                return name
        return None

    async def puller_of(self, source: str) -> str:
        """The node that waits for the KV that `source` computes."""
        (transfer,) = (await self.ledger(source))["transfers"].values()
        return self.names[transfer["puller"]]

    async def holder_of(self, role: str, stream: Stream) -> str | None:
        """The node that runs a request whose first token has arrived."""
        name = f"{stream.generation.id}/"
        return await self.holder_during(
            stream,
            role,
            lambda ledger: any(key.startswith(name) for key in ledger.get("requests", ())),
        )

    # --- healing and checking ---------------------------------------------------------------------

    async def heal(self) -> None:
        """Restart what is dead, and wait until every node is ready and every pair linked."""
        await until(self._is_whole, every_s=0.05)  # starting processes need the CPU

    async def _is_whole(self) -> bool:
        self.cluster.restart_dead()  # each time: broken processes may end later
        await asyncio.to_thread(lambda: [p.address for p in self.cluster.processes.values()])
        try:
            for gateway in (n for n in self.cluster.processes if n.startswith("gateway")):
                listed = (await self.client(gateway).model_info()).nodes
                ready = {node.incarnation: node.name for node in listed if node.is_ready}
                if len(ready) != len(self.cluster.nodes()):
                    return False
                self.names = ready
            pullers = [await self.ledger(name) for name in self.cluster.nodes("decode")]
        except (BatonError, grpc.aio.AioRpcError):
            return False
        num_sources = len(self.cluster.nodes("prefill"))
        links = [list(ledger.get("peers", {}).values()) for ledger in pullers]
        return all(states.count("ready") >= num_sources for states in links)

    async def wait_idle(self, *names: str, timeout_s: float = 5.0) -> float:
        """Wait until these nodes hold no requests or transfers; returns the seconds taken."""
        began_s = time.monotonic()
        for name in names or self.cluster.nodes():

            async def is_node_idle(name: str = name) -> bool:
                return is_idle(await self.ledger(name))

            await until(is_node_idle, timeout_s)
        return time.monotonic() - began_s

    def found_s(self, stream: Stream) -> float:
        """Seconds from the fault to the dispatch that it caused."""
        return stream.routed_s()[-1] - self.broken_s

    @property
    def worst(self) -> Stream:
        """The finished stream that was dispatched most often."""
        return max((s for s in self.streams if s.error is None), key=lambda s: s.result.attempts)

    async def check(self) -> None:
        """Check O1 to O5 once all streams are over; heals."""
        self.cluster.restart_dead()
        for stream in self.streams:
            await stream.end()  # O1
        computing = asyncio.to_thread(self.reference.tokens, self.streams)
        references, _ = await asyncio.gather(computing, self.heal())
        for stream, expected in zip(self.streams, references, strict=True):
            _check_stream(stream, len(expected))
            self.num_near_ties += self.reference.num_near_ties(stream, expected)
        await self.wait_idle()  # O3
        await self._check_leftovers()

    async def _check_leftovers(self) -> None:
        """O4: one engine per node, one socket per engine, no growing number of descriptors."""
        engines = [self.cluster.engine_pid(name) for name in self.cluster.nodes()]
        assert len(set(engines)) == len(self.cluster.nodes())
        self.cluster.incarnations |= self.names.keys()

        def sockets() -> set[str]:
            found = {name.rpartition("-")[2] for name in abstract_sockets()}
            return found & self.cluster.incarnations

        async def no_other_socket() -> bool:
            return sockets() == self.names.keys()

        await until(no_other_socket)
        for name, process in self.cluster.processes.items():
            pid = process.process.pid
            num_fds = len(os.listdir(f"/proc/{pid}/fd"))
            assert num_fds <= self.cluster.fds.setdefault(pid, num_fds) + SPARE_FDS, name


async def until(
    holds: Callable[[], Awaitable[bool]], timeout_s: float = PATIENCE_S, every_s: float = 0.005
) -> None:
    """Poll for a condition in another process."""
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(every_s)


def _check_stream(stream: Stream, num_tokens: int) -> None:
    """O2 and O5: all tokens arrived, or the expected error."""
    if stream.expected_error is not None:
        assert isinstance(stream.error, stream.expected_error) and stream.error.message
    elif stream.may_fail and stream.error is not None:
        assert type(stream.error) is not BatonError and stream.error.message
    else:
        assert list(stream.result.token_ids) == stream.tokens
        assert len(stream.tokens) == num_tokens
