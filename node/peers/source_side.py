"""What others pull from this engine: prompts computed for them, and prefixes out of its cache.

    Attach, Renew, Release ─► Source ─┬─► manifests          the role's: `feed`, `on_release`
                                      └─► PinPrefix ─► lent  prefixes: answered here, at once

Glue: the engine decides about blocks, `kv_transfer.protocol.source` about leases.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import assert_never

from msgspec.structs import replace

from ...core.errors import BatonError, StaleBlocks
from ...core.request.request import Ticket
from ...engine.engine import Engine
from ...engine.kv.block_pool import Fence
from ...kv_transfer.protocol.events import (
    Chunk,
    ClosePeer,
    Offered,
    PinPrefix,
    ReleaseBlocks,
    Send,
    SourceEvent,
    Withdrawn,
)
from ...kv_transfer.protocol.messages import HandoffState, Hello
from ...kv_transfer.protocol.source import Source
from ...kv_transfer.window.network_address import PoolAccess
from ..channels.mailboxes import Kind, Outbox

log = logging.getLogger(__name__)

_LENT = ""  # the key of what no request here computes


class SourceSide:
    """`machine` decides; `on_release` gets the key of each request whose hand-off is over, and why,
    if it failed."""

    def __init__(
        self, source: Source, engine: Engine, outbox: Outbox, incarnation: str, access: PoolAccess
    ) -> None:
        """`access`: how the engine's pools are reached; pullers' keys are made from its key."""
        self.machine = source
        self._engine = engine
        self._outbox = outbox
        self._incarnation = incarnation
        self._access = access
        self._lent: dict[str, Fence] = {}  # by transfer
        self.on_release: Callable[[str, BatonError | None], None] = lambda key, error: None

    @property
    def is_idle(self) -> bool:
        return not self._lent

    def feed(self, event: SourceEvent) -> None:
        for effect in self.machine.handle(event):
            match effect:
                case Send(incarnation, message):
                    if isinstance(message, Hello):
                        message = replace(message, access=self._access.of_puller(incarnation))
                    self._outbox.to_peer(Kind.PULLER, incarnation, message)
                case ClosePeer(incarnation, error):
                    log.warning("refused puller %s: %s", incarnation, error.message)
                    self._outbox.close_peer(Kind.PULLER, incarnation, error)
                case PinPrefix():
                    self._lend(effect)
                case ReleaseBlocks(transfer_id, key) if key == _LENT:
                    if (fence := self._lent.pop(transfer_id, None)) is not None:
                        self._engine.prefixes.give_back(fence)
                case ReleaseBlocks(transfer_id, key, error):
                    self.on_release(key, error)
                case _:
                    assert_never(effect)

    def _lend(self, pin: PinPrefix) -> None:
        """All of them, or none: nobody waits here for memory or for a step."""
        transfer_id, lent = pin.transfer_id, self._engine.prefixes.lend(pin.block_hashes)
        if lent is None:
            self.feed(Withdrawn(transfer_id, StaleBlocks("the prefix cannot be lent")))
            return
        self._lent[transfer_id], refs = lent
        ticket = Ticket(transfer_id, self._incarnation, pin.puller)
        self.feed(Offered(ticket, key=_LENT, deadline_s=math.inf))
        num_tokens = len(refs) * self._engine.limits.block_size
        self.feed(Chunk(transfer_id, refs, num_tokens, HandoffState(len(refs))))
