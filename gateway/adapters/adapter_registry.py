"""The LoRA adapters that this gateway serves, by name: loaded on every engine, or on none.

    load(name, path) ─► LoadAdapter to every linked engine ─► all have the same content ─► served
                                                          └─► one refuses ─► error with its name

Each dispatched request carries its adapter's path: an engine that linked later, or evicted the
adapter, loads it then. So no per-engine state is kept here; a new engine only gets LoadAdapter
early. Loading and unloading at one gateway takes effect at all gateways (shared_list.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ...core.errors import (
    AdapterRefused,
    BatonError,
    InvalidRequest,
    ModelNotFound,
    NodeLost,
    StartupFailed,
    Unavailable,
)
from ...core.request.request import Adapter
from ...core.request.text_parameters import is_label
from ..engines.cluster_view import why_not_ready
from ..engines.engine_connection import Loaded
from ..engines.engine_table import EngineTable
from ..engines.linked_engine import LinkedEngine
from .shared_list import AdapterEntry, SharedList, holds

log = logging.getLogger(__name__)

_LOAD_S = 120.0  # limit for loading an adapter on all engines
_RETRY_S = 0.2
_SHARE_S = 0.25  # between two exchanges with the shared list
_MAX_PATH_CHARS = 4096  # PATH_MAX of Linux


class AdapterRegistry:
    """Use from the event loop's thread. `run` loads `modules` once engines are linked."""

    def __init__(
        self,
        table: EngineTable,
        model: str,
        modules: Iterable[str] = (),
        shared: SharedList | None = None,
    ) -> None:
        """`modules`: name=path each; `shared`: the list of all gateways. Raises StartupFailed."""
        self._table, self._model, self._shared = table, model, shared
        self._entries: dict[str, AdapterEntry] = {}  # by name, including unloaded ones
        self._modules = dict(_module(text, model) for text in modules)
        self._adapters: dict[str, Adapter] = {}
        self.adapters: Mapping[str, Adapter] = MappingProxyType(self._adapters)  # those served
        self._loading: set[str] = set()
        self._folder = os.getcwd()
        self.is_settled = not self._modules

    async def load(self, name: str, path: str) -> Adapter:
        """Serve the adapter at `path`, a folder on every engine's host.

        A relative path is relative to the gateway's working folder. Raises InvalidRequest for a
        name that is taken (here, or by another gateway meanwhile) or invalid, and for an invalid
        path; AdapterRefused, which names the engine; Unavailable without an engine.
        """
        if not is_label(name):
            raise InvalidRequest("no name of a model", "lora_name", "invalid_value")
        if not _is_path(path):
            raise InvalidRequest("no path of a folder", "lora_path", "invalid_value")
        if name == self._model or name in self._adapters or name in self._loading:
            raise _taken(name)
        self._loading.add(name)
        try:
            adapter = await self._load(name, os.path.join(self._folder, path))
        finally:
            self._loading.discard(name)
        if name not in self._adapters:
            self._note(name, adapter)
            if self._shared is not None:
                await self._exchange(self._shared)
                await asyncio.sleep(_SHARE_S)  # until the other gateways serve it too
        if self._adapters.get(name, adapter).digest != adapter.digest:
            raise _taken(name)
        return adapter

    def unload(self, name: str) -> None:
        """Refuse new requests for it; running ones continue. Raises ModelNotFound."""
        if name not in self._adapters:
            message = f"The LoRA adapter `{name[:64]}` does not exist."
            raise ModelNotFound(message, param="lora_name")
        self._note(name, None)

    def _note(self, name: str, adapter: Adapter | None) -> None:
        """Serve the adapter under this name (None: stop serving it), here and then elsewhere."""
        entry = self._entries.get(name)
        version = 1 if entry is None else entry.version + 1
        digest, path = ("", "") if adapter is None else (adapter.digest, adapter.path)
        self._take(AdapterEntry(name, version, digest, path))

    def _take(self, entry: AdapterEntry) -> None:
        self._entries[entry.name] = entry
        if entry.digest:
            self._adapters[entry.name] = Adapter(entry.name, entry.digest, entry.path)
            log.info("LoRA adapter %s is served", entry.name)
        elif self._adapters.pop(entry.name, None) is not None:
            log.info("LoRA adapter %s is not served any more", entry.name)

    async def _exchange(self, shared: SharedList) -> None:
        for entry in await shared.exchange(self._entries):
            is_sound = entry.name != self._model and is_label(entry.name) and _is_path(entry.path)
            if is_sound and holds(entry, self._entries):  # again: own entries may change
                self._take(entry)

    async def share(self) -> None:
        """Follow the loads and unloads of other gateways until cancelled."""
        while self._shared is not None:
            await asyncio.sleep(_SHARE_S)
            await self._exchange(self._shared)

    async def run(self) -> None:
        """Load the modules. An adapter that an engine refuses is logged and not served."""
        if self._shared is not None:
            await self._exchange(self._shared)  # for versions of unloaded adapters
        for name, path in self._modules.items():
            while name not in self._adapters:
                if why_not_ready(self._table):
                    await asyncio.sleep(_RETRY_S)
                    continue
                try:
                    await self.load(name, path)
                except Unavailable:
                    await asyncio.sleep(_RETRY_S)
                except BatonError as error:
                    log.error("LoRA adapter %s is not served: %s", name, error.message)
                    break
        self.is_settled = True
        self._modules.clear()  # so that an adapter unloaded later stays unloaded

    async def _load(self, name: str, path: str) -> Adapter:
        engines = [*self._table.engines.values()]
        answers = [engine.outbox.load_adapter(name, path) for engine in engines]
        try:
            async with asyncio.timeout(_LOAD_S):
                found = await asyncio.gather(*answers)
        except TimeoutError:
            raise Unavailable(f"not all engines loaded {name} within {_LOAD_S:g} s") from None
        digests = {one for one in found if isinstance(one, str)}
        for engine, one in zip(engines, found, strict=True):
            if isinstance(one, BatonError) and not isinstance(one, NodeLost):
                kind = type(one) if one.is_retryable else AdapterRefused
                raise kind(f"{engine.name} refuses {name}: {one.message}", param="lora_path")
        if not digests:
            raise Unavailable("there is no engine to load a LoRA adapter on")
        if len(digests) > 1:
            raise AdapterRefused(f"{path} is not the same on all hosts", "lora_path")
        return Adapter(name, digests.pop(), path)

    def linked(self, engine: LinkedEngine) -> None:
        """Have a newly linked engine load the adapters before a request needs them."""
        for adapter in self._adapters.values():
            answer = engine.outbox.load_adapter(adapter.name, adapter.path)
            answer.add_done_callback(_log_refusal)


def _taken(name: str) -> InvalidRequest:
    message = f"the name {name!r} is taken: unload it first"
    return InvalidRequest(message, "lora_name", "invalid_value")


def _is_path(path: str) -> bool:
    return "\0" not in path and len(path) <= _MAX_PATH_CHARS


def _log_refusal(answer: asyncio.Future[Loaded]) -> None:
    if not answer.cancelled() and isinstance(found := answer.result(), BatonError):
        log.warning("a new engine has not loaded a LoRA adapter: %s", found.message)


def _module(text: str, model: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not path or not is_label(name) or name == model:
        raise StartupFailed(
            f"--lora-modules: {text!r} is no name=path", hint="a name other than those of the model"
        )
    return name, path
