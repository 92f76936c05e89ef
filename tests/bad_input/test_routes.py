"""The list of all routes and methods: a new route must be added here."""

from __future__ import annotations

import re

import pytest
from bad_input.cases.fronts import LEAKS, Target, read_answer
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

ROUTES = {
    "/live": "GET", "/ready": "GET", "/load": "GET", "/health": "GET", "/version": "GET",
    "/v1/models": "GET", "/v1/models/{model}": "GET", "/server_info": "GET",
    "/v1/load_lora_adapter": "POST", "/v1/unload_lora_adapter": "POST",
    "/v1/completions": "POST", "/v1/chat/completions": "POST",
    "/v1/responses": "POST", "/v1/responses/{response_id}": "GET DELETE",
    "/v1/messages": "POST", "/v1/messages/count_tokens": "POST",
    "/tokenize": "POST", "/detokenize": "POST",
    "/openapi.json": "GET", "/metrics": "GET",
    "/dashboard": "GET", "/dashboard/": "GET", "/dashboard/{path}": "GET",
    "/dashboard/login": "GET POST", "/api/snapshot": "GET", "/api/stream": "GET",
}  # fmt: skip
SERVICES = {
    "baton.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
}  # fmt: skip

# B65: paths that other servers have.
ABSENT = [
    "/", "/v1", "/v1/", "/v1/nope", "/V1/models", "//v1/models", "/v1//models", "/v1/models/",
    "/v1/../admin", "/v1/%2e%2e/admin", "/v1/..%2fadmin", "/%2e%2e/%2e%2e/etc/passwd", "/admin",
    "/admin/drain", "/invocations", "/update_weights", "/update_weights_from_disk", "/pause",
    "/resume", "/sleep", "/wake_up", "/collective_rpc", "/load_lora_adapter",
    "/reset_prefix_cache", "/flush_cache", "/start_profile", "/stop_profile", "/generate",
    "/get_server_info", "/v1/embeddings", "/v1/responses/", "/v1/responses/resp_1/input_items",
    "/v1/files", "/v1/batches",
    "/register_instance", "/bootstrap", "/docs", "/redoc", "/.env", "/.git/config", "/debug/pprof",
    "/dashboard/../app.py", "/dashboard/%2e%2e/app.py", "/dashboard/..%2f..%2fapp.py",
    "/dashboard/index.html%00.js", "/dashboard//etc/passwd", "/live/", "/live/x", "/live;x",
]  # fmt: skip

POOLING = [
    f"{prefix}/{name}"
    for prefix in ("", "/v1")
    for name in ("embeddings", "embed", "score", "rerank", "pooling", "classify")
] + ["/v2/rerank", "/api/embed"]


def test_these_routes_and_no_others(target: Target) -> None:
    """The server has exactly these routes; HEAD counts like its GET."""
    found: dict[str, set[str]] = {}
    for method, path in target.routes:
        if method != "HEAD":
            found.setdefault(path, set()).add(method)
    assert found == {path: set(methods.split()) for path, methods in ROUTES.items()}


@pytest.mark.parametrize("path", ABSENT)
def test_absent_paths(target: Target, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE"):
        with target.connect() as plain:
            plain.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            answer = read_answer(plain)
        assert (answer.status, answer.code in ("not_found", "model_not_found")) in (
            (404, True), (405, False),
        ), answer  # fmt: skip
        assert answer.status == 404 or path.startswith(("/dashboard/", "/v1/models/")), answer
        assert not LEAKS.search(answer.text.replace(path, "")), answer


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/responses/resp_1/cancel", "GET and DELETE /v1/responses/{response_id}"),
        ("/v1/messages/batches", "files are not supported"),
        ("/messages", "the path is /v1/messages"),
        ("/api/chat", "POST /v1/chat/completions"),
        *((path, "no embeddings and no scores") for path in POOLING),
        ("/v1/audio/speech", "generates text"),
        ("/v1/threads/x/runs", "nothing is kept"),
        ("/v1/batches", "`baton run-batch --url`"),
        ("/generate", "POST /v1/completions"),
        ("/chat/completions", "the path is /v1/chat/completions"),
        ("/v1/v1/chat/completions", "the path is /v1/chat/completions"),
        ("/v1/completions/", "the path is /v1/completions"),
        ("/load_lora_adapter", "the path is /v1/load_lora_adapter"),
        ("/unload_lora_adapter", "the path is /v1/unload_lora_adapter"),
        ("/get_model_info", "GET /v1/models"),
        ("/wat", "/v1/chat/completions, /v1/completions"),
        ("/" + "x/" * 2000, "GET /openapi.json"),
    ],
)
def test_an_absent_path_is_told_what_there_is(target: Target, path: str, instead: str) -> None:
    answer = target.post(path, {})
    assert (answer.status, answer.code) == (404, "not_found")
    assert instead in answer.text and len(answer.text) < 600


def test_other_methods_of_routes(target: Target) -> None:
    for path, methods in ROUTES.items():
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"}:
            if method not in methods.split():
                answer = target.http(method, re.sub(r"{\w+}", "x", path))
                assert (answer.status, answer.code) == (405, "method_not_allowed")


@pytest.mark.parametrize("name", ["x", "resp_" + "0" * 32, "a" * 5000, "%00", "..%2f..", "%f0%9f"])
def test_responses_that_are_not_kept(target: Target, name: str) -> None:
    """B90: GET and DELETE of a response id that is not stored return 404."""
    for method in ("GET", "DELETE"):
        answer = target.http(method, f"/v1/responses/{name}")
        assert (answer.status, answer.code) in (
            (404, "previous_response_not_found"), (404, "not_found"),
        ), answer  # fmt: skip
        assert len(answer.text) < 600 and not LEAKS.search(answer.text)
    answer = target.http("GET", f"/v1/responses/{name}?stream=true")
    assert answer.status in (400, 404)


def test_these_services_and_no_others(target: Target) -> None:
    """Reflection lists exactly these services; unlisted methods are called in
    test_credentials.py."""
    stub = target.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=ServerReflectionRequest.SerializeToString,
        response_deserializer=ServerReflectionResponse.FromString,
    )
    (answer,) = stub(iter([ServerReflectionRequest(list_services="")]), timeout=20)
    assert {service.name for service in answer.list_services_response.service} == SERVICES


@pytest.mark.parametrize(
    "method",
    ["/baton.v1.Inference/generate", "/baton.v1.Inference/", "/baton.v1.inference/Generate",
     "/Generate", "/", "/baton.v1.Inference/Generate/x", "/baton.v1.Engine/Configure",
     "/inference.GRPCInferenceService/ModelInfer", "/../baton.v1.Node/GetLedgers"],
)  # fmt: skip
def test_absent_methods(target: Target, method: str) -> None:
    """B76: methods that do not exist get an error."""
    answer = target.call(method, b"")
    assert answer.status in ("UNIMPLEMENTED", "INTERNAL"), answer
    assert not LEAKS.search(answer.text)
