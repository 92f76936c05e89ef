"""An engine's direct channels: to its peers, to gateways, and the one socket where both ask.

A link (Handoff.Link of a peer, Node.Session of a gateway) passes the supervisors. It proves who is
at the other end and stands for the pair: a channel ends with its link, and one that breaks ends it.
Whether there is a channel is settled before the first message that could use it, so messages that
have an order among themselves go one way. Only the engine loop's thread is here.
"""

from __future__ import annotations

from typing import Any

from ...core.channels.direct_question import Asker, Question
from .direct_gateways import DirectGateways
from .direct_peers import DirectPeers
from .inbox import Inbox
from .listener import Reception
from .watched_channel import WatchedChannel


class DirectChannels:
    """All of one engine. `listen` makes it one that others can ask."""

    def __init__(self, incarnation: str, host_id: bytes, inbox: Inbox[Any]) -> None:
        self._reception = Reception(incarnation, inbox, self._admit)
        self.gateways = DirectGateways()
        self.peers = DirectPeers(incarnation, host_id, inbox, lambda: self._reception.is_open)

    def listen(self) -> None:
        """Let linked pullers and gateways of this host connect. Raises StartupFailed."""
        self._reception.listen()

    def close(self) -> None:
        self.peers.close()
        self.gateways.close()
        self._reception.close()

    def ledger(self) -> dict[str, dict[str, str]]:
        """Which way messages go: by peer, and by gateway's stream."""
        return {"ways": self.peers.ledger(), "gateway_ways": self.gateways.ledger()}

    def _admit(self, question: Question, channel: WatchedChannel) -> bool:
        if question.asker is Asker.GATEWAY:
            return self.gateways.admit(question, channel)
        return self.peers.admit(question, channel)
