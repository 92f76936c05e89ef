"""Which requests that were running when an engine died are accepted by another engine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from fakes.clock import FakeClock

from baton.core.errors import TrialRefused
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.node.requests.request_io import Entry, RequestIO
from baton.node.requests.trials import Trials


class Rig:
    def __init__(self) -> None:
        send: Any = None  # nothing is output
        self.requests = RequestIO(send, FakeClock(), "n", 1000)
        self.num_outputs = Counter[str]()
        self.trials = Trials(self.requests, lambda key: self.num_outputs[key])

    def ask(self, name: str, gateway: str) -> str:
        """Admit a request with two tokens streamed by an earlier attempt; returns its key."""
        request = Request(name, 1, (1, 2, 3), SamplingParams(), (7, 8), is_on_trial=True)
        entry = Entry(request, gateway, 60.0, None)
        self.requests.open(entry)
        self.num_outputs[entry.key] = 2
        self.trials.admit(entry)
        return entry.key


def test_another_gateway_s_waits_until_it_is_over_or_further() -> None:
    rig = Rig()
    first = rig.ask("a", "here")
    with pytest.raises(TrialRefused):
        rig.ask("b", "there")
    rig.num_outputs[first] = 3  # the third token is the prefill engine's
    with pytest.raises(TrialRefused):
        rig.ask("c", "there")
    rig.num_outputs[first] = 4
    second = rig.ask("d", "there")
    with pytest.raises(TrialRefused):
        rig.ask("e", "here")
    rig.requests.end(second, None)
    rig.ask("f", "here")


def test_a_gateway_keeps_its_own_apart_itself() -> None:
    rig = Rig()
    rig.ask("a", "here")
    rig.ask("b", "here")
