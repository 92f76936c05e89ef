"""A process that plays the nodes behind a gateway, as fast as the gateway takes them.

    python -m baton.bench.fake_nodes REDIS_URL      prefill and decode engines without a model
    python -m baton.bench.fake_nodes bare           no gateway: a bare server of ready-made chunks
Prints `ready: ADDRESS`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from baton.cluster.redis_directory import RedisDirectory
from baton.core.membership import Member, Role
from baton.proto.v1 import common_pb2, inference_pb2, inference_pb2_grpc, node_pb2, node_pb2_grpc

CLUSTER = "bench"
PREFILL, DECODE = "a" * 32, "b" * 32
_NUM_BLOCKS = 100_000
_TOKEN_ID = 300
_OPTIONS = (("grpc.so_reuseport", 0),)


def _member(incarnation: str, role: Role, address: str) -> Member:
    return Member(incarnation, role, role.value, address, "demo", "fp", 2048, 16, _NUM_BLOCKS)


class _Requests:
    """One stream's requests: a step gives every running one its next token."""

    def __init__(self, is_prefill: bool) -> None:
        self._is_prefill = is_prefill
        self._running: dict[str, tuple[node_pb2.Dispatch, int]] = {}
        self.has_work = asyncio.Event()

    def take(self, message: node_pb2.GatewayMessage) -> None:
        if message.HasField("dispatch"):
            first_index = 0 if self._is_prefill else 1
            self._running[message.dispatch.request_id] = (message.dispatch, first_index)
            self.has_work.set()
        else:
            self._running.pop(message.cancel.request_id, None)

    def step(self) -> node_pb2.NodeMessage:
        outputs = []
        for request_id, (dispatch, index) in list(self._running.items()):
            is_last = index == dispatch.sampling.max_tokens - 1
            outputs.append(
                node_pb2.RequestOutput(
                    request_id=request_id,
                    attempt=dispatch.attempt,
                    first_index=index,
                    token_ids=(_TOKEN_ID,),
                    finish_reason=common_pb2.FINISH_REASON_LENGTH if is_last else 0,
                )
            )
            if is_last or self._is_prefill:
                del self._running[request_id]
            else:
                self._running[request_id] = (dispatch, index + 1)
        if not self._running:
            self.has_work.clear()
        return node_pb2.NodeMessage(outputs=node_pb2.StepOutputs(outputs=outputs))


class _Node(node_pb2_grpc.NodeServicer):
    def __init__(self) -> None:
        self.address = ""

    async def Session(self, incoming: Any, context: Any) -> None:
        is_prefill = dict(context.invocation_metadata())["baton-engine"] == PREFILL
        requests = _Requests(is_prefill)
        lock = asyncio.Lock()  # one write at a time

        async def write(message: node_pb2.NodeMessage) -> None:
            async with lock:
                await context.write(message)

        await write(self._welcome(is_prefill))
        tasks = [
            asyncio.create_task(_beat(write, is_prefill)),
            asyncio.create_task(_run(write, requests)),
        ]
        try:
            async for message in incoming:
                requests.take(message)
        finally:
            for task in tasks:
                task.cancel()

    def _welcome(self, is_prefill: bool) -> node_pb2.NodeMessage:
        role = Role.PREFILL if is_prefill else Role.DECODE
        member = _member(PREFILL if is_prefill else DECODE, role, self.address)
        return node_pb2.NodeMessage(
            welcome=node_pb2.Welcome(
                incarnation=member.incarnation,
                role=role.value,
                name=member.name,
                model=member.model,
                fingerprint=member.fingerprint,
                max_model_len=member.max_model_len,
                block_size=member.block_size,
                num_blocks=member.num_blocks,
            )
        )


async def _run(write: Any, requests: _Requests) -> None:
    while True:
        await requests.has_work.wait()
        await write(requests.step())
        await asyncio.sleep(0)  # else nobody reads what comes in while writes never wait


async def _beat(write: Any, is_prefill: bool) -> None:
    links = [] if is_prefill else [node_pb2.PeerLink(incarnation=PREFILL, transport="none")]
    heartbeat = node_pb2.Heartbeat(
        free_blocks=_NUM_BLOCKS, num_blocks=_NUM_BLOCKS, credit_blocks=_NUM_BLOCKS, links=links
    )
    while True:
        await write(node_pb2.NodeMessage(heartbeat=heartbeat))
        await asyncio.sleep(0.25)


class _Bare(inference_pb2_grpc.InferenceServicer):
    """What a gateway answers, without a gateway: the most that grpc.aio can stream here."""

    async def Generate(self, request: Any, context: Any) -> None:
        for index in range(request.sampling.max_tokens):
            await context.write(
                inference_pb2.GenerateChunk(
                    id=PREFILL, text=" the", token_ids=(_TOKEN_ID,), index=index
                )
            )
            await asyncio.sleep(0)  # as a gateway's streams take turns


async def _serve(redis_url: str) -> None:
    server = grpc.aio.server(options=_OPTIONS)
    node = _Node()
    if redis_url == "bare":
        inference_pb2_grpc.add_InferenceServicer_to_server(_Bare(), server)
    else:
        node_pb2_grpc.add_NodeServicer_to_server(node, server)
    node.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    if redis_url != "bare":
        directory = RedisDirectory(redis_url, CLUSTER, None)
        for incarnation, role in ((PREFILL, Role.PREFILL), (DECODE, Role.DECODE)):
            await directory.announce(_member(incarnation, role, node.address), 5.0)
    print(f"ready: {node.address}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
