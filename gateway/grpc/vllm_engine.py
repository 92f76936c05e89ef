"""`vllm.grpc.engine.VllmEngine` over the front door: for smg the deployment is one vLLM engine.

Owns the service's methods; vllm_wire.py converts messages. What only a vLLM engine can do
(embeddings, profiles, KV events) is UNIMPLEMENTED. Needs the stubs of smg-grpc-proto.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import io
import time
import zipfile
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from ...core.membership import Role
from ...core.model_dir import read_json
from ...core.version import version
from ..admission.front_door import FrontDoor
from ..engines.cluster_view import why_not_ready
from ..engines.engine_table import EngineTable
from ..engines.linked_engine import LinkedEngine
from ..security.accepted_keys import AcceptedKeys
from ..security.caller import INFER, METRICS
from .service import Context, GrpcFront, call_options, send_node_names
from .unary_methods import abort_calls, check_names
from .vllm_wire import SampleMessages, request_from_vllm

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "config.json", "generation_config.json"),
)
_ZIP_CHUNK_BYTES = 256 << 10


add_to_server = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server


class VllmEngineService(GrpcFront, vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """The service; the whole deployment is one engine."""

    def __init__(self, door: FrontDoor, keys: AcceptedKeys | None, table: EngineTable) -> None:
        super().__init__(door, keys)
        self._table = table
        self._config = read_json(door.model.model_dir / "config.json")
        self._started_s = time.monotonic()

    async def Generate(self, wire: Any, context: Context) -> None:
        await self._door.arrivals.take()
        caller = self._caller(context)
        request = request_from_vllm(wire)
        async with self._door.generate(request, caller, **call_options(context)) as generation:
            prompt = generation.record.request.prompt_token_ids
            samples = range(generation.record.request.options.n)
            answers = [SampleMessages(prompt, wire.stream) for _ in samples]
            async for chunk in generation.chunks():
                if chunk.result is not None:
                    send_node_names(context, chunk.result)
                for message in answers[chunk.sample_index].messages(chunk):
                    await context.write(message)

    async def Abort(self, wire: Any, context: Context) -> Any:
        check_names(wire.request_ids)
        abort_calls(self._door, wire.request_ids, self._caller(context))
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(self, wire: Any, context: Context) -> Any:
        """Open to all, like grpc.health.v1."""
        reason = "draining" if self._door.is_draining else why_not_ready(self._table)
        return vllm_engine_pb2.HealthCheckResponse(healthy=not reason, message=reason or "ready")

    async def GetModelInfo(self, wire: Any, context: Context) -> Any:
        self._check_may_use_model(context)
        limits, model, config = self._door.limits, self._door.model, self._config
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=limits.model,  # no path of this host's: GetTokenizer gives what is needed
            tokenizer_path=limits.model,
            served_model_name=limits.model,
            is_generation=True,
            max_context_length=limits.max_model_len,
            max_req_input_len=limits.max_prompt_tokens or limits.max_model_len,
            vocab_size=limits.vocab_size,
            model_type=str(config.get("model_type", "")),
            architectures=map(str, config.get("architectures") or ()),
            eos_token_ids=model.eos_token_ids,
            bos_token_id=_id(config.get("bos_token_id")),
            pad_token_id=_id(config.get("pad_token_id")),
        )

    async def GetServerInfo(self, wire: Any, context: Context) -> Any:
        self._check_may_use_model(context)
        engines = list(self._table.engines.values())
        return vllm_engine_pb2.GetServerInfoResponse(
            server_type="vllm-grpc",
            uptime_seconds=time.monotonic() - self._started_s,
            active_requests=sum(e.load.num_running for e in engines),
            data_parallel_size=1,
            block_size=max((e.member.block_size for e in engines), default=0),
        )

    async def GetLoads(self, wire: Any, context: Context) -> Any:
        """The load of all engines as one: running requests of decode engines, waiting ones of
        all."""
        self._caller(context).check_scope(METRICS)
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=version(),
            dp_rank_count=1,
            loads=[_load(list(self._table.engines.values()))],
        )

    async def GetTokenizer(self, wire: Any, context: Context) -> None:
        """A zip of the model's text files, in pieces; the last one carries its hash."""
        self._check_may_use_model(context)
        data = await asyncio.to_thread(_zipped, self._door.model.model_dir)
        for first in range(0, len(data), _ZIP_CHUNK_BYTES):
            piece = data[first : first + _ZIP_CHUNK_BYTES]
            is_last = first + len(piece) == len(data)
            digest = hashlib.sha256(data).hexdigest() if is_last else ""
            await context.write(common_pb2.GetTokenizerChunk(data=piece, sha256=digest))

    async def _unimplemented(self, wire: Any, context: Context) -> None:
        """Methods that smg calls but does not need, like the events of prefix caches."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Baton has no such method")

    Embed = FlushCache = StartProfile = StopProfile = SubscribeKvEvents = _unimplemented

    def _check_may_use_model(self, context: Context) -> None:
        """Raises Unauthenticated, PermissionDenied, ModelNotFound."""
        caller = self._caller(context)
        caller.check_scope(INFER)
        caller.check_model("", self._door.limits.model)


def _id(value: Any) -> int:
    """The id of the only or first special token; 0 if there is none, as in the protocol."""
    first = value[0] if isinstance(value, list) and value else value
    return first if type(first) is int else 0


def _load(engines: list[LinkedEngine]) -> Any:
    decode = [e for e in engines if e.member.role is Role.DECODE]
    num_running = sum(e.load.num_running for e in decode)
    num_waiting = sum(e.load.num_waiting for e in engines)
    total = sum(e.pool_tokens for e in decode)
    free = sum(e.load.free_blocks * e.member.block_size for e in decode)
    return vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=num_running,
        num_waiting_reqs=num_waiting,
        num_total_reqs=num_running + num_waiting,
        num_used_tokens=max(0, total - free),
        max_total_num_tokens=total,
        token_usage=max(0, total - free) / total if total else 0.0,
        num_waiting_uncached_tokens=sum(e.load.waiting_tokens for e in engines),
    )


def _zipped(model_dir: Path) -> bytes:
    """The files that a tokenizer needs, without weights."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _TOKENIZER_FILES:
            if (model_dir / name).is_file():
                archive.write(model_dir / name, name)
    return buffer.getvalue()
