"""Our OpenAPI document against our server: it responds as documented to all that it allows or
forbids.

Requests are generated from the schemas, valid and invalid; responses are checked against the
document.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from bad_input.cases.fronts import LEAKS, Target
from hypothesis import HealthCheck, Phase, given, seed, settings

_GENERATING = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/messages/count_tokens", "/tokenize", "/detokenize"),
)
_READING = (
    *(
        "/v1/models",
        "/v1/models/{model}",
        "/v1/responses/{response_id}",
        "/server_info",
        "/load",
        "/version",
        "/live",
        "/ready",
    ),
)


def _search(target: Target, path: str, num_requests: int, number: int) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    checks = pytest.importorskip("schemathesis.checks")
    specs = pytest.importorskip("schemathesis.specs.openapi.checks")
    of_all = (
        checks.not_a_server_error,
        specs.status_code_conformance,
        specs.content_type_conformance,
    )
    of_whole_answers = (*of_all, specs.response_schema_conformance)  # a stream has its data's
    document = json.loads(target.http("GET", "/openapi.json").text)
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=f"http://127.0.0.1:{target.http_port}")
    method = "POST" if path in _GENERATING else "GET"
    operation = schema[path][method]
    modes = schemathesis.GenerationMode
    for mode in (modes.POSITIVE, modes.NEGATIVE) if path in _GENERATING else (modes.POSITIVE,):

        @seed(number)
        @settings(
            max_examples=num_requests,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            response = case.call(timeout=20)
            is_stream = "event-stream" in str(response.headers.get("content-type"))
            case.validate_response(response, checks=of_all if is_stream else of_whole_answers)
            if response.status_code >= 400:
                assert not LEAKS.search(response.json()["error"]["message"])

        ask()


@pytest.mark.filterwarnings("ignore")  # the tool's own warnings
@pytest.mark.parametrize("path", [*_GENERATING, *_READING])
def test_what_the_document_says(target: Target, path: str) -> None:
    _search(target, path, 5 if path in _GENERATING else 3, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", _GENERATING)
def test_more_of_it(target: Target, path: str, request: pytest.FixtureRequest) -> None:
    number = request.config.getoption("--bad-input-seed")
    print(f"seed {number}")
    _search(target, path, 2000, number)
