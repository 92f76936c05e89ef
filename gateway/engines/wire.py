"""What engines' steps bring, as the gateway's values.

A node's times come on its monotonic clock; what hosts have as the time of day is never read:

    same host      the clock is one: a stamp is as long ago as it shows
    another host   the newest stamp of a message is from when the message came, the others as much
                   older as the node shows: what is between them is exact, the delivery counts as
                   waiting before them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import EngineFailed, InvalidRequest
from ...core.ports import Clock
from ...core.request.timeline import Stamp
from ...proto import codec
from ...proto.v1 import node_pb2
from ..request.engine_link import EngineOutput, PlainToken, TransferSummary


@dataclass(frozen=True, slots=True)
class NodeClock:
    """`is_ours`: the node is on this host."""

    node: str
    clock: Clock
    is_ours: bool = False

    def stamps(self, received: Sequence[node_pb2.NodeEvent]) -> tuple[Stamp, ...]:
        """Those of a message that comes now. Raises InvalidRequest."""
        if not received:
            return ()
        newest_ns = max(event.monotonic_ns for event in received)
        our_ns = int(self.clock.monotonic_s() * 1e9)
        read_ns = our_ns if self.is_ours and newest_ns <= our_ns else newest_ns
        ahead_ns = self.clock.unix_ns() - read_ns
        return tuple(
            Stamp(codec.event_from_wire(event.event), event.monotonic_ns + ahead_ns, self.node)
            for event in received
        )


def output_from_wire(wire: node_pb2.RequestOutput, clock: NodeClock) -> EngineOutput:
    """An engine's output, which comes now; one that cannot be read fails its attempt."""
    try:
        stamps = clock.stamps(wire.events)
        logprobs = tuple(map(codec.logprobs_from_wire, wire.logprobs))
        prompt_logprobs = tuple(map(codec.logprobs_from_wire, wire.prompt_logprobs))
    except InvalidRequest as error:
        broken = EngineFailed(f"unreadable output: {error.message}")
        return EngineOutput(wire.request_id, wire.attempt, error=broken)
    transfer = None
    if wire.HasField("transfer"):
        moved = wire.transfer
        transfer = TransferSummary(moved.bytes, moved.cached_tokens, moved.transport)
    return EngineOutput(
        request_id=wire.request_id,
        attempt=wire.attempt,
        first_index=wire.first_index,
        token_ids=tuple(wire.token_ids),
        finish_reason=codec.finish_from_wire(wire.finish_reason),
        error=codec.error_from_wire(wire.error) if wire.HasField("error") else None,
        stamps=stamps,
        cached_tokens=wire.cached_tokens if wire.HasField("cached_tokens") else None,
        transfer=transfer,
        logprobs=logprobs,
        first_prompt_index=wire.first_prompt_index,
        prompt_logprobs=prompt_logprobs,
    )


def tokens_from_wire(wire: node_pb2.PlainTokens) -> list[PlainToken]:
    """A step's plain tokens. Raises EngineFailed if the columns do not match."""
    try:
        return [*zip(wire.request_ids, wire.attempts, wire.indices, wire.token_ids, strict=True)]
    except ValueError as error:
        raise EngineFailed("its columns of tokens do not match") from error
