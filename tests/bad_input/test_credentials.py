"""Authentication and authorisation: B55 to B62, B78 and B91, on both fronts."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import closing

import pytest
from bad_input.cases.fronts import GOOD, LEAKS, PROMPT, Answer, Target, read_answer
from bad_input.cases.target import SECRET
from bad_input.conftest import Keyed

from baton.cluster.secret import handshake_key
from baton.core.channels.admission import GATEWAY, dial
from baton.core.errors import NodeLost
from baton.proto.v1 import inference_pb2, node_pb2


def _request(max_tokens: int = 3, prompt: str = PROMPT) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest(text=prompt)
    message.sampling.max_tokens = max_tokens
    return message


def _both(keyed: Keyed, headers: Sequence[tuple[str, str]]) -> tuple[Answer, Answer]:
    """A good request with these headers over HTTP, and as gRPC metadata."""
    body = json.dumps(GOOD).encode()
    head = [
        "POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json",
        f"Content-Length: {len(body)}", *(f"{name}: {value}" for name, value in headers),
    ]  # fmt: skip
    with keyed.target.connect() as plain:
        plain.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        over_http = read_answer(plain)
    metadata = [(name.lower(), value) for name, value in headers]
    return over_http, keyed.target.generate(_request(), metadata)


@pytest.mark.parametrize(
    "values",
    [[], [""], ["Basic dTpw"], ["Bearer"], ["Bearer "], ["bk-x"], ["Token bk-x"],
     ["Bearer bk-" + "0" * 64], ["Bearer " + "x" * 600], ["Bearer bk-x", "Bearer bk-y"],
     ["Bearer @operator"], ["Bearer null"]],
    ids=lambda values: f"B57-{len(values)}-{'-'.join(values)[:18]}",
)  # fmt: skip
def test_no_good_key(keyed: Keyed, values: list[str]) -> None:
    over_http, over_grpc = _both(keyed, [("Authorization", value) for value in values])
    assert (over_http.status, over_http.code) == (401, "unauthenticated")
    assert over_http.headers["WWW-Authenticate"] == "Bearer"
    assert (over_grpc.status, over_grpc.code) == ("UNAUTHENTICATED", "unauthenticated")
    for value in values:
        assert len(value) < 8 or value not in over_http.text + over_grpc.text


def test_a_good_key_beside_another_is_no_key(keyed: Keyed) -> None:
    good = ("Authorization", keyed.bearer("plain")["Authorization"])
    over_http, over_grpc = _both(keyed, [good, good])
    assert (over_http.status, over_grpc.status) == (401, "UNAUTHENTICATED")


def test_a_key_of_a_megabyte(keyed: Keyed) -> None:
    """B58: a key of a megabyte is refused by its size, before it is compared."""
    over_http = keyed.target.post("/v1/completions", GOOD, Authorization="Bearer " + "x" * 10_000)
    assert (over_http.status, over_http.code) == (431, "headers_too_large")
    over_grpc = keyed.target.generate(_request(), [("authorization", "Bearer " + "x" * (1 << 20))])
    assert over_grpc.status == "RESOURCE_EXHAUSTED"


def test_no_model_is_told_to_who_may_not_use_it(keyed: Keyed) -> None:
    """B59: a model that this key may not use gets the response of one that does not exist."""
    bearer = keyed.bearer("elsewhere")
    metadata = [("authorization", bearer["Authorization"])]
    for model in ("demo", "another", "no-such"):
        over_http = keyed.target.post("/v1/completions", GOOD | {"model": model}, **bearer)
        assert (over_http.status, over_http.code) == (404, "model_not_found")
        assert over_http.text.replace(model, "X") == (
            '{"error": {"message": "The model `X` does not exist.", "type": '
            '"invalid_request_error", "param": "model", "code": "model_not_found"}}'
        )
        message = _request()
        message.model = model
        over_grpc = keyed.target.generate(message, metadata)
        assert (over_grpc.status, over_grpc.code) == ("NOT_FOUND", "model_not_found")
    assert json.loads(keyed.target.http("GET", "/v1/models", headers=bearer).text)["data"] == []


def test_a_scope_goes_no_further(keyed: Keyed) -> None:
    watcher, plain = keyed.bearer("watcher"), keyed.bearer("plain")
    assert keyed.target.post("/v1/completions", GOOD, **watcher).status == 403
    over_grpc = keyed.target.generate(_request(), [("authorization", watcher["Authorization"])])
    assert (over_grpc.status, over_grpc.code) == ("PERMISSION_DENIED", "permission_denied")
    for path in ("/metrics", "/server_info", "/dashboard", "/api/snapshot", "/api/stream"):
        assert keyed.target.http("GET", path, headers=plain).status == 403


def test_a_limit_of_requests(keyed: Keyed) -> None:
    """B61: both fronts count towards one limit."""
    bearer = keyed.bearer("slow")
    metadata = [("authorization", bearer["Authorization"])]
    assert keyed.target.post("/v1/completions", GOOD, **bearer).status == 200
    over_http = keyed.target.post("/v1/completions", GOOD, **bearer)
    assert (over_http.status, over_http.code) == (429, "rate_limit_exceeded")
    assert 1 <= int(over_http.headers["Retry-After"]) <= 60
    over_grpc = keyed.target.generate(_request(), metadata)
    assert (over_grpc.status, over_grpc.code) == ("RESOURCE_EXHAUSTED", "rate_limit_exceeded")
    assert 0 < int(over_grpc.headers["retry-after-ms"]) <= 60_000


def test_a_limit_of_tokens(keyed: Keyed) -> None:
    bearer = keyed.bearer("small")
    body = GOOD | {"max_tokens": 15}
    assert keyed.target.post("/v1/completions", body, **bearer).status == 200
    over_http = keyed.target.post("/v1/completions", body, **bearer)
    assert (over_http.status, over_http.code) == (429, "rate_limit_exceeded")


def test_a_limit_of_streams(keyed: Keyed) -> None:
    """B62: an incomplete body takes no slot; a running call does."""
    bearer = keyed.bearer("single")
    assert keyed.target.post("/v1/completions", GOOD, **bearer).status == 200
    two = keyed.target.post("/v1/completions", GOOD | {"prompt": ["a", "b"]}, **bearer)
    assert (two.status, two.code) == (429, "rate_limit_exceeded")
    assert keyed.target.post("/v1/completions", GOOD, **bearer).status == 200, "its place is free"


def test_every_route_asks_for_a_key_but_these(keyed: Keyed) -> None:
    is_open = {"/live", "/ready", "/health", "/version", "/dashboard/login"}
    for method, route in keyed.target.routes:
        path = route.replace("{model}", "demo").replace("{path}", "app.js")
        answer = keyed.target.http(method, path)
        asks = answer.status == 401
        if route in ("/dashboard", "/dashboard/"):
            assert (answer.status, answer.headers["Location"]) == (303, "/dashboard/login")
        else:
            assert asks != (route in is_open), (method, route, answer.status)


INTERNAL_CALLS = [
    ("/baton.v1.Node/GetLedgers", node_pb2.GetLedgersRequest().SerializeToString()),
    ("/baton.v1.Node/GetMembers", node_pb2.GetMembersRequest().SerializeToString()),
]


@pytest.mark.parametrize(("method", "data"), INTERNAL_CALLS)
def test_internal_calls_are_not_on_the_public_port(
    target: Target, keyed: Keyed, method: str, data: bytes
) -> None:
    """B78: with or without a key, internal methods are absent, and reflection does not list
    them."""
    bearer = [("authorization", f"Bearer {keyed.keys['plain']}")]
    for place, metadata in ((target, []), (keyed.target, bearer)):
        assert place.call(method, data, metadata).status == "UNIMPLEMENTED"


@pytest.mark.parametrize("method", ["GetLedgers", "GetMembers"])
def test_a_clients_key_opens_no_node(keyed: Keyed, method: str) -> None:
    """B78: nodes require the cluster's secret, and reject a client's key."""
    key = keyed.keys["plain"]
    with closing(keyed.target.open_channel(keyed.target.node_port)) as channel:
        proof = node_pb2.GetLedgersRequest(handshake=key.encode()).SerializeToString()
        for payload in (b"", proof):
            bearer = [("authorization", f"Bearer {key}")]
            answer = keyed.target.call(f"/baton.v1.Node/{method}", payload, bearer, channel=channel)
            assert answer.status == "UNAUTHENTICATED", answer


def test_a_clients_key_opens_no_engine(keyed: Keyed) -> None:
    """B78: engines require the cluster's secret too."""
    address, engine = f"127.0.0.1:{keyed.target.engine_port}", keyed.target.incarnation
    for key in (handshake_key(keyed.keys["plain"]), handshake_key(None)):
        with pytest.raises(NodeLost, match="hung up"):
            dial(GATEWAY, key, dialer="d" * 32, listener=engine, address=address)
    key = handshake_key(SECRET)
    dial(GATEWAY, key, dialer="d" * 32, listener=engine, address=address).close()


def test_foreign_pages(target: Target) -> None:
    """B91: foreign host names, cross-origin requests, and a web socket from another origin are
    refused."""
    cases = [
        ("Host: evil.example\r\n", 421),
        ("", 400),
        ("Host: localhost\r\nHost: localhost\r\n", 400),
        ("Host: localhost\r\nOrigin: http://evil.example\r\n", 403),
        ("Host: localhost\r\nOrigin: null\r\n", 403),
        ("Host: localhost\r\nOrigin: http://evil.example\r\nUpgrade: websocket\r\n"
         "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n", 403),
    ]  # fmt: skip
    for head, status in cases:
        with target.connect() as plain:
            plain.sendall(f"GET /api/snapshot HTTP/1.1\r\n{head}\r\n".encode())
            answer = read_answer(plain)
            assert answer.status == status, head
            assert not LEAKS.search(answer.text)


def test_a_label_of_many_characters_or_with_markup(target: Target) -> None:
    """B54, B91: a client's label for a call is limited in length, and returned only as text."""
    message = _request()
    message.request_id = "x" * 257
    answer = target.generate(message)
    assert (answer.status, answer.param) == ("INVALID_ARGUMENT", "request_id")
    label = "<script>alert(1)</script>"
    over_http = target.post("/v1/completions", GOOD, X_Request_ID=label)
    assert over_http.headers["X-Request-ID"] == label
    assert over_http.headers["Content-Type"].startswith("application/json")
    for path in ("/dashboard", "/api/snapshot", "/metrics"):
        assert label not in target.http("GET", path).text


def test_ports_are_not_shared(target: Target) -> None:
    """Like F34: no other process can listen on our ports."""
    for port in (target.http_port, target.grpc_port):
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError):
                plain.bind(("127.0.0.1", port))
