"""Requests under which an engine died, of several gateways: no two of them on one engine.

A gateway tries its own ones apart from each other (gateway/request/setbacks.py), and knows of no
other gateway's. So one of another gateway is sent back until the first is over here, or has got
further than where its engine died: if this engine dies too, it is known under which of them.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.errors import TrialRefused
from .request_io import Entry, RequestIO

_FURTHER = 2  # tokens: the next is the prefill engine's, the one behind it the decode engine's


class Trials:
    """One engine's. `num_outputs`: of a request's key; 0 where the engine has none of it."""

    def __init__(self, requests: RequestIO, num_outputs: Callable[[str], int]) -> None:
        self._requests = requests
        self._num_outputs = num_outputs
        self._tried: str | None = None  # its key

    def admit(self, entry: Entry) -> None:
        """Of one on trial. Raises TrialRefused beside another gateway's."""
        other = None if self._tried is None else self._requests.get(self._tried)
        if other is not None and other.gateway != entry.gateway:
            num_known = len(other.request.output_token_ids)
            if self._num_outputs(other.key) < num_known + _FURTHER:
                raise TrialRefused("another gateway's request is on trial here")
        self._tried = entry.key
