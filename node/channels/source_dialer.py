"""An engine's use of the directory's list of engines, which its supervisor sends: which engines may
dial it, and which sources a puller dials, and dials again.

    members ─► engines of the same model ─► a thread each: dial, wait for the end, back off

A source that leaves the list keeps its channel, since the list is a hint, but is not dialled again.
A source whose fingerprint differs is dialled once: the engines compare field by field, and the one
that refuses names the field. Knows no message.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...core.channels.addresses import host_id, host_of
from ...core.channels.admission import PULLER, Secure, dial
from ...core.channels.channel import Channel
from ...core.channels.engine_tls import plain_end
from ...core.errors import BatonError, HandoffFailed
from ...core.membership import Role
from ...proto.v1 import engine_pb2, node_pb2
from .links import Kind, Link

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
_WAIT_S = 1.0  # an engine may dial a moment before its entry arrives here
STEADY_S = 1.0  # a link that lasted this long was good: the back-off starts anew at its end


@dataclass(eq=False)
class SourceDialer:
    """`list_members` and `link_over` are for the loop's thread, `is_listed` and `name_of` for any;
    `close` ends all attempts.

    `_us`: the dialling engine, which proves that it holds `_key`; `_secure` begins TLS with a
    source. `_on_link` gets every channel that a source has accepted, on other threads, none after
    `close`. It must not block.
    """

    _us: node_pb2.Welcome
    _key: bytes = field(repr=False)
    _secure: Secure | None
    _on_link: Callable[[Link], None]
    _host_id: bytes = field(default_factory=host_id)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _listed: Mapping[str, engine_pb2.ListedEngine] = field(default_factory=dict)  # by incarnation
    _is_away: bool = False  # the directory is
    _dialled: set[str] = field(default_factory=set)  # sources that have a dialling thread
    _refused: set[str] = field(default_factory=set)  # with another fingerprint, once linked
    _is_closed: bool = False

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def list_members(self, members: engine_pb2.Members) -> None:
        """Replace the list: the directory has these engines now."""
        with self._changed:
            self._listed = {engine.incarnation: engine for engine in members.engines}
            self._is_away = members.is_away
            self._refused &= self._listed.keys()
            for incarnation in self._listed.keys() - self._dialled - self._refused:
                if self._is_source(self._listed[incarnation]):
                    self._dialled.add(incarnation)
                    dialling = threading.Thread(
                        target=self._keep_linked, args=(incarnation,), daemon=True
                    )
                    dialling.start()
            self._changed.notify_all()

    def _is_source(self, engine: engine_pb2.ListedEngine) -> bool:
        return engine.model == self._us.model and engine.incarnation != self._us.incarnation

    def is_listed(self, incarnation: str) -> bool:
        """Whether the engine is listed, or is listed within a second.

        True while the directory is unreachable, as new engines cannot be listed then: the proof of
        the cluster's key is enough.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: incarnation in self._listed or self._is_away, _WAIT_S
            )

    def name_of(self, incarnation: str) -> str:
        """The name of the engine's node, for people; empty if the engine is not listed."""
        with self._changed:
            engine = self._listed.get(incarnation)
            return "" if engine is None else engine.name

    def link_over(self, link: Link) -> None:
        """A link's channel was closed."""
        with self._changed:
            self._changed.notify_all()

    def _keep_linked(self, incarnation: str) -> None:
        """Dial one source for as long as it is listed."""
        delay_s, last_reason = FIRST_DELAY_S, ""
        while (source := self._source(incarnation)) is not None:
            try:
                link = self._dial(source)
            except Exception as error:  # a bug must not end the attempts
                if repr(error) != last_reason:
                    last_reason, is_ours = repr(error), not isinstance(error, OSError | BatonError)
                    where = (source.name, source.address)
                    log.warning("no link to %s (%s): %s", *where, error, exc_info=is_ours)
            else:
                last_reason = ""
                is_steady = self._wait_for_end(link)
                if source.fingerprint != self._us.fingerprint:
                    why = link.ended_by
                    log.warning("not linked to %s (%s): %s", source.name, source.address, why)
                    with self._changed:
                        self._refused.add(incarnation)
                if is_steady:
                    delay_s = FIRST_DELAY_S
            self._pause(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _source(self, incarnation: str) -> engine_pb2.ListedEngine | None:
        """The source's entry; None if it must not be dialled any more: its thread ends."""
        with self._changed:
            source = self._listed.get(incarnation)
            if source is None or self._is_closed or incarnation in self._refused:
                self._dialled.discard(incarnation)
                return None
            return source

    def _dial(self, source: engine_pb2.ListedEngine) -> Link:
        """Raises OSError, BatonError."""
        connection = dial(
            *(PULLER, self._key),
            dialer=self._us.incarnation,
            listener=source.incarnation,
            address=None if source.host_id == self._host_id else source.address,
            secure=self._secure,
        )
        if isinstance(connection, ssl.SSLSocket):
            connection = plain_end(connection)
        host = host_of(source.address)
        hands_off = (source.role, self._us.role) == (Role.PREFILL.value, Role.DECODE.value)
        link = Link(
            *(Kind.SOURCE, source.incarnation, Channel(connection), host),
            opens_late=not hands_off,
            peer=source.name,
        )
        with self._changed:
            if self._is_closed:
                link.channel.close()
                raise HandoffFailed("the engine ends")
            self._on_link(link)
        return link

    def _wait_for_end(self, link: Link) -> bool:
        """Returns whether the channel lasted for STEADY_S."""
        with self._changed:
            is_short = self._changed.wait_for(lambda: self._is_over(link), STEADY_S)
            self._changed.wait_for(lambda: self._is_over(link))
        return not is_short

    def _is_over(self, link: Link) -> bool:
        return link.channel.is_closed or self._is_closed

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, seconds)
