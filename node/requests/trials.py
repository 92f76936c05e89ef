"""Suspect requests, during which an engine has died: an engine never runs those of two gateways.

A gateway retries its own suspects one at a time (gateway/request/setbacks.py), and does not know
those of others. So an engine rejects another gateway's suspect until the first has ended here, or
has got further than where its engine died: if this engine dies too, the cause is known.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.errors import TrialRefused
from .request_io import Entry, RequestIO

_FURTHER = 2  # tokens: the next is the prefill engine's, the one behind it the decode engine's


class Trials:
    """The suspect requests of one engine. `num_outputs`: tokens so far, given a request's key; 0 if
    the engine has none of it."""

    def __init__(self, requests: RequestIO, num_outputs: Callable[[str], int]) -> None:
        self._requests = requests
        self._num_outputs = num_outputs
        self._tried: str | None = None  # its key

    def admit(self, entry: Entry) -> None:
        """Admit a suspect. Raises TrialRefused if another gateway's is running."""
        other = None if self._tried is None else self._requests.get(self._tried)
        if other is not None and other.gateway != entry.gateway:
            num_known = len(other.request.output_token_ids)
            if self._num_outputs(other.key) < num_known + _FURTHER:
                raise TrialRefused("another gateway's suspect request runs here")
        self._tried = entry.key
