"""Baton: serve large language models with prefill and decode on different GPUs.

    from baton import LLM, SamplingParams          without a server: docs/offline.md
    from baton.client import Client                of a running deployment

The first two are imported when they are used: torch comes with LLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .offline.beam_search import BeamSearchParams
    from .offline.llm import LLM
    from .offline.outputs import CompletionOutput, RequestOutput
    from .offline.sampling_params import SamplingParams

__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "RequestOutput", "SamplingParams"]

_MODULES = {
    "BeamSearchParams": "beam_search",
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".offline.{_MODULES[name]}", __name__), name)
