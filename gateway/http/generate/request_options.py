"""What both generating endpoints read alike: the stream's options and the caller's label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest
from ...validation.validation import check_label
from ..protocol.error_middleware import REQUEST_ID_HEADER
from .responses import ResponsePlan
from .run_prompts import PromptsCall


def stream_plan(found: Mapping[str, Any], calls: Sequence[PromptsCall]) -> ResponsePlan:
    """Raises InvalidRequest for options of a stream that is none."""
    is_stream = found.get("stream", False)
    options = found.get("stream_options", {})
    if "stream_options" in found and not is_stream:
        raise InvalidRequest(
            "stream_options are for streams: set stream",
            param="stream_options",
            code="invalid_value",
        )
    continuous = options.get("continuous_usage_stats", False)
    return ResponsePlan(
        calls=calls,
        num_samples=found.get("n", 1),
        is_stream=is_stream,
        includes_usage=options.get("include_usage", False),
        has_continuous_usage=continuous and options.get("include_usage", False),
    )


def model_of(found: Mapping[str, Any]) -> str:
    """The model that is asked for; raises InvalidRequest where none is."""
    if not found.get("model"):
        raise InvalidRequest("model is required", param="model", code="missing_required")
    return str(found["model"])


def label_of(request: web.Request) -> str:
    """The client's name for the request; empty if it gave none. Raises InvalidRequest."""
    label = request.headers.get(REQUEST_ID_HEADER, "")
    check_label(label, REQUEST_ID_HEADER)
    return label
