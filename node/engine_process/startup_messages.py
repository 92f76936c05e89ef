"""The settings that an engine process gets at its start, and the messages in which it describes
itself."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass

from ...core import flags
from ...core.channels.channel import FrameSocket
from ...core.channels.engine_tls import EngineTls
from ...core.config import NodeConfig
from ...core.engine_config import EngineConfig
from ...engine import assembly
from ...engine.execution.runner import ModelRunner
from ...engine.kv.limits import EngineLimits
from ...engine.model import fingerprint
from ...proto.v1 import engine_pb2, node_pb2
from .engine_links import Keys
from .role_plan import RolePlan


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings from the supervisor: the first frame."""

    engine: EngineConfig
    node: NodeConfig
    tls: EngineTls | None
    keys: Keys


def read_settings(frames: FrameSocket) -> Settings:
    payload = frames.receive()
    if payload is None:
        raise ConnectionError("received no configuration")
    settings = json.loads(engine_pb2.EngineInput.FromString(payload).configure)
    accepted = {bytes.fromhex(i): bytes.fromhex(key) for i, key in settings["keys"].items()}
    return Settings(
        flags.from_json(EngineConfig, settings["engine"]),
        flags.from_json(NodeConfig, settings["node"]),
        None if settings["tls"] is None else EngineTls(**settings["tls"]),
        Keys(bytes.fromhex(settings["dialing_key"]), accepted),
    )


def limits_of(
    plan: RolePlan, engine: EngineConfig, node: NodeConfig, runner: ModelRunner
) -> EngineLimits:
    limits = assembly.limits_of(engine, runner)
    return dataclasses.replace(limits, max_held_blocks=plan.max_held_blocks(node, limits.capacity))


def welcome_of(
    plan: RolePlan,
    engine: EngineConfig,
    node: NodeConfig,
    runner: ModelRunner,
    limits: EngineLimits,
    incarnation: str,
) -> node_pb2.Welcome:
    return node_pb2.Welcome(
        incarnation=incarnation,
        role=plan.name.value,
        name=node.name or plan.name.value,
        model=engine.served_model_name or runner.model_dir.name,
        fingerprint=fingerprint.short(runner.fingerprint),
        max_model_len=runner.max_model_len,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        block_bytes=limits.block_bytes,
        vocab_size=runner.model_config.vocab_size,
        eos_token_ids=runner.eos_token_ids,
        max_num_seqs=limits.max_num_seqs,
        tbt_target_s=engine.tbt_target_s or 0.0,
        max_loras=0 if runner.adapters is None else engine.max_loras,
        num_host_blocks=0 if runner.host_copier is None else runner.host_copier.most_blocks,
    )


def describe_pool(limits: EngineLimits) -> str:
    """The size of the KV pool in blocks, tokens and requests, as text for people."""
    num_tokens = limits.capacity * limits.block_size
    return (
        f"{limits.capacity:,} KV blocks of {limits.block_size} = {num_tokens:,} tokens; "
        f"{num_tokens // limits.max_model_len:,} requests of {limits.max_model_len:,}"
    )


class LoadReport:
    """Sends progress lines of loading, at most one per second."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._last_s = time.monotonic()

    def on_progress(self, num_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if num_bytes == total_bytes or now_s - self._last_s > 1.0:
            self._last_s = now_s
            share = 100 * num_bytes // max(1, total_bytes)
            self.line(f"weights {share} % of {total_bytes / 1e6:,.1f} MB")

    def line(self, text: str) -> None:
        self._frames.send(engine_pb2.EngineOutput(progress=text))
