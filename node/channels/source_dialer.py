"""An engine's use of the directory's list of engines, which its supervisor sends: which engines may
dial it (`MemberList`), and which sources a puller dials, and dials again (`SourceDialer`).

    members ─► engines of the same model ─► a thread each: dial, wait for the end, back off

A source that leaves the list keeps its channel, since the list is a hint, but is not dialled again.
A source whose fingerprint differs is dialled once: the engines compare field by field, and the one
that refuses names the field. Knows no message.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...core.channels.addresses import host_of
from ...core.channels.admission import PULLER, dial
from ...core.channels.channel import Channel
from ...core.channels.engine_tls import plain_end
from ...core.errors import BatonError, HandoffFailed
from ...core.membership import Role
from ...proto.v1 import engine_pb2
from .links import Kind, Link

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
_WAIT_S = 1.0  # an engine may dial a moment before its entry arrives here
STEADY_S = 1.0  # a link that lasted this long was good: the back-off starts anew at its end


@dataclass(frozen=True, slots=True)
class Puller:
    """The dialling engine. It proves that it holds `key`; `secure` begins TLS with a source, raises
    OSError.

    `awaits_handoffs`: prefill engines hand off to it.
    """

    incarnation: str
    model: str
    fingerprint: str
    host_id: bytes
    key: bytes
    secure: Callable[[socket.socket], ssl.SSLSocket] | None
    awaits_handoffs: bool = True


class SourceDialer:
    """`list_members` and `link_over` are for the loop's thread; `close` ends all attempts."""

    def __init__(self, puller: Puller, on_link: Callable[[Link], None]) -> None:
        """`on_link` gets every channel that a source has accepted, on other threads, none after
        `close`. It must not block.
        """
        self._puller = puller
        self._on_link = on_link
        self._changed = threading.Condition()
        self._sources: Mapping[str, engine_pb2.ListedEngine] = {}
        self._dialled: set[str] = set()  # sources that have a dialling thread
        self._linked: dict[str, Link] = {}
        self._refused: set[str] = set()  # with another fingerprint, linked once already
        self._is_closed = False

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def list_members(self, members: engine_pb2.Members) -> None:
        """Replace the list: the directory has these engines now."""
        puller = self._puller
        with self._changed:
            self._sources = {
                engine.incarnation: engine
                for engine in members.engines
                if engine.incarnation != puller.incarnation and engine.model == puller.model
            }
            self._refused &= self._sources.keys()
            for incarnation in self._sources.keys() - self._dialled - self._refused:
                self._dialled.add(incarnation)
                threading.Thread(target=self._keep_linked, args=(incarnation,), daemon=True).start()
            self._changed.notify_all()

    def link_over(self, link: Link) -> None:
        """A source's channel has ended."""
        with self._changed:
            if self._linked.get(link.name) is link:
                del self._linked[link.name]
                self._changed.notify_all()

    def _keep_linked(self, incarnation: str) -> None:
        """Dial one source for as long as it is listed."""
        delay_s, last_reason = FIRST_DELAY_S, ""
        while (source := self._listed(incarnation)) is not None:
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
                if source.fingerprint != self._puller.fingerprint:
                    why = link.ended_by
                    log.warning("not linked to %s (%s): %s", source.name, source.address, why)
                    with self._changed:
                        self._refused.add(incarnation)
                if is_steady:
                    delay_s = FIRST_DELAY_S
            self._pause(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _listed(self, incarnation: str) -> engine_pb2.ListedEngine | None:
        """The source's entry; None if it must not be dialled any more: its thread ends."""
        with self._changed:
            source = self._sources.get(incarnation)
            if source is None or self._is_closed or incarnation in self._refused:
                self._dialled.discard(incarnation)
                return None
            return source

    def _dial(self, source: engine_pb2.ListedEngine) -> Link:
        """Raises OSError, BatonError."""
        puller = self._puller
        connection = dial(
            *(PULLER, puller.key),
            dialer=puller.incarnation,
            listener=source.incarnation,
            address=None if source.host_id == puller.host_id else source.address,
            secure=puller.secure,
        )
        if isinstance(connection, ssl.SSLSocket):
            connection = plain_end(connection)
        host = host_of(source.address)
        is_handing_off = puller.awaits_handoffs and source.role == Role.PREFILL.value
        link = Link(
            *(Kind.SOURCE, source.incarnation, Channel(connection), host),
            opens_late=not is_handing_off,
            peer=source.name,
        )
        with self._changed:
            if self._is_closed:
                link.channel.close()
                raise HandoffFailed("the engine ends")
            self._linked[link.name] = link
            self._on_link(link)
        return link

    def _wait_for_end(self, link: Link) -> bool:
        """Returns whether the channel lasted for STEADY_S."""
        with self._changed:
            is_short = self._changed.wait_for(lambda: not self._is_up(link), STEADY_S)
            self._changed.wait_for(lambda: not self._is_up(link))
        return not is_short

    def _is_up(self, link: Link) -> bool:
        return self._linked.get(link.name) is link and not self._is_closed

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, seconds)


class MemberList:
    """Which engines the directory lists now. `has` and `name_of` are for any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._names: Mapping[str, str] = {}  # by incarnation
        self._is_away = False

    def list_members(self, members: engine_pb2.Members) -> None:
        with self._changed:
            self._names = {engine.incarnation: engine.name for engine in members.engines}
            self._is_away = members.is_away
            self._changed.notify_all()

    def has(self, incarnation: str) -> bool:
        """Whether the engine is listed, or is listed within a second.

        True while the directory is unreachable, as new engines cannot be listed then: the proof of
        the cluster's key is enough.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: incarnation in self._names or self._is_away, _WAIT_S
            )

    def name_of(self, incarnation: str) -> str:
        """The name of the engine's node, for people; empty if the engine is not listed."""
        with self._changed:
            return self._names.get(incarnation, "")
