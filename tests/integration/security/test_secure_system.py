"""A deployment with all security features: HTTPS, gRPC over TLS, API keys, mutual TLS inside."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from deployments import Running, running

from baton.cli.cluster.survey import ask_ledgers, survey
from baton.cli.host.certs import make_certificates, with_role_certificate
from baton.client import Client
from baton.cluster.known_nodes import LEDGERS, NodeAddress, fetch_members
from baton.cluster.known_nodes import dial as dial_node
from baton.cluster.secret import ClusterSecret
from baton.cluster.tls import ClusterTls, role_name
from baton.core.channels.admission import GATEWAY as PURPOSE_GATEWAY
from baton.core.channels.admission import PULLER, dial
from baton.core.config import GatewayConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import (
    Cancelled,
    ModelNotFound,
    NodeLost,
    PermissionDenied,
    RateLimited,
    Unauthenticated,
    Unavailable,
)
from baton.core.membership import Role
from baton.gateway.security.key_file import add_key
from baton.proto.v1 import node_pb2, node_pb2_grpc

PROMPT = "A beginning that several prompts have in common, several blocks of it. " * 2
INFER = frozenset({"infer"})


@dataclass
class Secured:
    """The deployment, and its clients' certificates and keys."""

    system: Running
    certs: Path
    key_file: Path
    keys: dict[str, str]
    http: str

    def client(self, name: str | None, ca: Path | None = None) -> Client:
        key = None if name is None else self.keys.get(name, name)
        return Client(self.system.address, api_key=key, ca_file=ca or self.certs / "ca.crt")

    def ask(
        self, path: str, name: str | None = None, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.http + path, data, headers)
        if body is not None and "Content-Type" not in headers:
            request.add_header("Content-Type", "application/json")
        if name is not None:
            request.add_header("Authorization", f"Bearer {self.keys.get(name, name)}")
        handler = urllib.request.HTTPSHandler(
            context=ssl.create_default_context(cafile=str(self.certs / "ca.crt"))
        )
        try:
            with urllib.request.build_opener(handler, _NoRedirect).open(request) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("security")
    certs, key_file = folder / "certs", folder / "keys.json"
    make_certificates(certs)
    keys = {name: add_key(key_file, name, INFER) for name in ("acme", "globex")}
    keys["hasty"] = add_key(key_file, "hasty", INFER, limits={"requests_per_minute": 1})
    keys["frugal"] = add_key(key_file, "frugal", INFER, limits={"tokens_per_minute": 300})
    keys["picky"] = add_key(key_file, "picky", INFER, limits={"tokens_per_minute": 300})
    keys["foreign"] = add_key(key_file, "foreign", INFER, models=frozenset({"another"}))
    keys["watcher"] = add_key(key_file, "watcher", frozenset({"metrics"}))
    engine = EngineConfig(device="cpu", cpu_kv_bytes=32 << 20)
    gateway = GatewayConfig(grpc_port=0, http_port=0, api_keys=str(key_file))
    with running(
        engine, up=UpConfig(mode="disaggregated", certs=str(certs)), gateway=gateway
    ) as system:
        (ready,) = (line for line in system.lines if line.startswith("gateway | ready:"))
        yield Secured(system, certs, key_file, keys, ready.split()[-2])


# --- prompts --------------------------------------------------------------------------------------


def test_a_prompt_passes_over_tls_with_a_key(secured: Secured) -> None:
    with secured.client("acme") as client:
        result = client.generate("def fib(n):", max_tokens=4, temperature=0.0).result
    assert result.decode_node == "decode-0"
    assert result.transfer_bytes > 0
    body = {"model": "demo", "prompt": "def fib(n):", "max_tokens": 4, "temperature": 0}
    status, _, answer = secured.ask("/v1/completions", "acme", body)
    assert status == 200
    assert json.loads(answer)["choices"][0]["text"] == result.text
    assert len([line for line in secured.system.lines if "linked with gateway" in line]) == 2


def test_tenants_have_their_own_parts_of_the_prefix_cache(secured: Secured) -> None:
    def cached_tokens(name: str, **params: Any) -> int:
        with secured.client(name) as client:
            return client.generate(PROMPT, max_tokens=2, **params).result.cached_tokens

    assert cached_tokens("acme") == 0
    assert cached_tokens("acme") > 0
    assert cached_tokens("globex") == 0
    assert cached_tokens("globex") > 0
    assert cached_tokens("acme", cache_salt="mine") == 0


# --- permissions ----------------------------------------------------------------------------------


def test_who_has_no_good_key_gets_nothing(secured: Secured) -> None:
    for key in (None, "bk-wrong", "x" * 500):
        with secured.client(key) as client:
            for call in (
                lambda c: c.generate("x", max_tokens=1).result,
                lambda c: c.tokenize("x"), lambda c: c.detokenize([1]),
                lambda c: c.model_info(), lambda c: c.abort("x"),
            ):  # fmt: skip
                with pytest.raises(Unauthenticated):
                    call(client)
        for path in ("/v1/models", "/metrics", "/api/snapshot", "/v1/nothing"):
            status, headers, answer = secured.ask(path, key)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            assert json.loads(answer)["error"]["code"] == "unauthenticated"
    assert secured.ask("/live")[0] == secured.ask("/ready")[0] == 200
    assert secured.ask("/update_weights")[0] == 404


def test_keys_open_what_their_scopes_say(secured: Secured) -> None:
    with secured.client("watcher") as client:
        assert {node.role for node in client.model_info().nodes} == {"prefill", "decode"}
        with pytest.raises(PermissionDenied):
            client.tokenize("x")
    with secured.client("acme") as client:
        assert client.model_info().nodes == ()
    assert secured.ask("/metrics", "watcher")[0] == 200
    assert secured.ask("/metrics", "acme")[0] == 403
    assert secured.ask("/v1/models", "watcher")[0] == 403
    with secured.client("foreign") as client, pytest.raises(ModelNotFound):
        client.generate("x", max_tokens=1).result  # noqa: B018 (a property that reads)
    body = {"model": "demo", "prompt": "x", "max_tokens": 1}
    assert secured.ask("/v1/completions", "foreign", body)[0] == 404


def test_over_its_limit_a_tenant_is_told_at_once_and_when_to_come_again(secured: Secured) -> None:
    with secured.client("hasty") as client:
        client.tokenize("x")
        took_s = []
        for _ in range(5):
            began_s = time.monotonic()
            with pytest.raises(RateLimited) as raised:
                client.generate("x", max_tokens=1).result  # noqa: B018
            took_s.append(time.monotonic() - began_s)
        assert min(took_s) < 0.05, "of several, since the machine may be busy"
        assert 50 < raised.value.retry_after_s <= 60
    body = {"model": "demo", "prompt": "x"}
    status, headers, answer = secured.ask("/v1/completions", "hasty", body)
    assert (status, json.loads(answer)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 50 < int(headers["Retry-After"]) <= 60


def test_tokens_that_were_not_generated_are_given_back(secured: Secured) -> None:
    with secured.client("frugal") as client:
        for _ in range(2):  # each may use most of a minute's token budget
            with client.generate("x", max_tokens=200, ignore_eos=True) as stream:
                next(stream)
        time.sleep(0.2)  # the gateway learns of the last call's end
        assert len(client.generate("x", max_tokens=200, ignore_eos=True).result.token_ids) == 200
        # The token budget refills evenly, also while a busy machine takes its time for these.
        with pytest.raises(RateLimited, match="tokens per minute"):
            client.generate("x", max_tokens=295).result  # noqa: B018


def test_samples_that_best_of_leaves_out_were_generated_too(secured: Secured) -> None:
    with secured.client("picky") as client:
        result = client.generate("x", max_tokens=16, best_of=16, ignore_eos=True).result
        assert len(result.token_ids) == 16
        time.sleep(0.2)
        with pytest.raises(RateLimited, match="tokens per minute"):
            client.generate("x", max_tokens=16, best_of=16, ignore_eos=True).result  # noqa: B018


def test_only_its_own_calls_are_a_tenant_s_to_abort(secured: Secured) -> None:
    with secured.client("acme") as acme, secured.client("globex") as globex:
        stream = acme.generate("x", max_tokens=400, ignore_eos=True, request_id="label")
        next(stream)
        assert globex.abort("label", stream.id) == 0
        assert acme.abort("label") == 1
        with pytest.raises(Cancelled):
            stream.result  # noqa: B018


def test_a_browser_logs_in_by_a_form(secured: Secured) -> None:
    def log_in(key: str) -> tuple[int, dict[str, str], bytes]:
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        return secured.ask("/dashboard/login", body=f"key={key}".encode(), **form)

    assert secured.ask("/dashboard")[0] == 303
    assert b"<form" in secured.ask("/dashboard/login")[2]
    assert log_in("bk-wrong")[0] == 401
    assert log_in(secured.keys["acme"])[0] == 403
    status, headers, _ = log_in(secured.keys["watcher"])
    cookie = headers["Set-Cookie"]
    assert status == 303
    assert {"HttpOnly", "SameSite=Strict", "Secure"} <= {p.strip() for p in cookie.split(";")}
    assert secured.ask("/metrics", Cookie=cookie.split(";")[0])[0] == 200


def test_foreign_pages_reach_nothing(secured: Secured) -> None:
    assert secured.ask("/v1/models", "acme", Host="evil.example")[0] == 421
    assert secured.ask("/v1/models", "acme", Origin="https://evil.example")[0] == 403


# --- certificates ---------------------------------------------------------------------------------


def channel(secured: Secured, node: str, shown: str | None, expected: str) -> grpc.aio.Channel:
    """A channel to a node, with the certificate of `shown`, expecting a server of the role
    `expected`."""
    ca = (secured.certs / "ca.crt").read_bytes()
    pair = [(secured.certs / f"{shown}.{end}").read_bytes() for end in ("key", "crt")]
    credentials = grpc.ssl_channel_credentials(ca, *(pair if shown else (None, None)))
    options = (("grpc.ssl_target_name_override", role_name(expected)),)
    address = secured.system.node_addresses()[node]
    return grpc.aio.secure_channel(address, credentials, options)


def status_of_ledger(
    secured: Secured, node: str, shown: str | None, expected: str
) -> grpc.StatusCode:
    secret = ClusterSecret.of(secured.system.deployment.cluster)
    address = secured.system.node_addresses()[node]

    async def ask() -> None:
        async with channel(secured, node, shown, expected) as opened:
            await ask_ledgers(node_pb2_grpc.NodeStub(opened), secret, address)

    try:
        asyncio.run(ask())
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def is_told_members(secured: Secured, shown: str) -> bool:
    """Whether prefill-0 returns its members to a caller with the certificate of `shown`."""
    tls = ClusterTls(*(secured.certs / name for name in ("ca.crt", f"{shown}.crt", f"{shown}.key")))
    secret = ClusterSecret.of(secured.system.deployment.cluster)
    node = NodeAddress(secured.system.node_addresses()["prefill-0"], Role.PREFILL)
    try:
        return len(asyncio.run(fetch_members(secret, tls, node))) == 1
    except NodeLost as error:
        assert "needs a certificate of the role gateway or decode" in error.message
        return False


async def status_of_slow_opening(secured: Secured) -> grpc.StatusCode:
    """The status for a caller of the wrong role that sends nothing for 0.3 s after opening its
    call."""
    secret = ClusterSecret.of(secured.system.deployment.cluster)
    address = secured.system.node_addresses()["prefill-0"]
    async with channel(secured, "prefill-0", "decode", "prefill") as opened:
        stub = node_pb2_grpc.NodeStub(opened)  # type: ignore[no-untyped-call]
        call = stub.GetLedgers(timeout=5)
        await call.wait_for_connection()
        await asyncio.sleep(0.3)
        try:
            await dial_node(call, node_pb2.GetLedgersRequest, secret, LEDGERS, address)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def status_of_plain_text(address: str) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(address) as opened:
        code: grpc.StatusCode = await node_pb2_grpc.NodeStub(opened).GetLedgers(timeout=5).code()
        return code


def test_a_node_serves_the_right_role_alone(secured: Secured) -> None:
    status = grpc.StatusCode
    assert status_of_ledger(secured, "prefill-0", "gateway", "prefill") is status.OK
    for shown in ("prefill", "decode"):
        found = status_of_ledger(secured, "prefill-0", shown, "prefill")
        assert found is status.PERMISSION_DENIED
    assert asyncio.run(status_of_slow_opening(secured)) is status.PERMISSION_DENIED
    reported = {
        shown for shown in ("gateway", "prefill", "decode") if is_told_members(secured, shown)
    }
    assert reported == {"gateway", "decode"}
    # The TLS handshake fails: a certificate for servers only, an unexpected role, plain text.
    assert status_of_ledger(secured, "prefill-0", "server", "prefill") is status.UNAVAILABLE
    assert status_of_ledger(secured, "prefill-0", "gateway", "decode") is status.UNAVAILABLE
    address = secured.system.node_addresses()["prefill-0"]
    assert asyncio.run(status_of_plain_text(address)) is status.UNAVAILABLE


def refusal(
    secured: Secured, node: str, purpose: bytes, shown: str | None, expected: str, dialer: str = ""
) -> str:
    """An engine's reason to refuse a dialer with the certificate of `shown` that expects the role
    `expected`; empty if accepted. `shown` None: in plain text."""
    engine = secured.system.engines()[node]

    def secure(connection: socket.socket) -> socket.socket:
        context = ssl.create_default_context(cafile=str(secured.certs / "ca.crt"))
        context.load_cert_chain(*(secured.certs / f"{shown}.{end}" for end in ("crt", "key")))
        return context.wrap_socket(connection, server_hostname=role_name(expected))

    try:
        dial(
            *(purpose, ClusterSecret.of(secured.system.deployment.cluster).dialing_key),
            dialer=dialer or secrets.token_hex(16),
            listener=engine.incarnation,
            address=engine.engine_address,
            secure=secure if shown else None,
        ).close()
    except PermissionDenied as error:
        return error.message
    except (OSError, NodeLost):
        return "nothing but an end"
    return ""


def test_an_engine_takes_the_right_role_alone(secured: Secured) -> None:
    puller, stranger = secured.system.engines()["decode-0"].incarnation, "e" * 32
    for node in ("prefill-0", "decode-0"):
        role = node.partition("-")[0]
        assert refusal(secured, node, PURPOSE_GATEWAY, "gateway", role) == ""
        for shown in ("prefill", "decode"):
            reported = refusal(secured, node, PURPOSE_GATEWAY, shown, role)
            assert reported == f"this needs the certificate of {role_name('gateway')}"
        # The TLS handshake fails: a certificate for servers only, an unexpected role, plain text.
        for shown, expected in (("server", role), ("gateway", "gateway"), (None, role)):
            reported = refusal(secured, node, PURPOSE_GATEWAY, shown, expected)
            assert reported == "nothing but an end"
    either = " or ".join(map(role_name, ("decode", "prefill")))
    for node in ("prefill-0", "decode-0"):  # any engine pulls from any other
        role = node.partition("-")[0]
        reported = refusal(secured, node, PULLER, "gateway", role, puller)
        assert reported == f"this needs the certificate of {either}"
        for shown in ("prefill", "decode"):
            reported = refusal(secured, node, PULLER, shown, role, stranger)
            assert reported == f"engine {stranger} is not in the directory"


def test_plain_text_finds_nobody(secured: Secured) -> None:
    client = Client(secured.system.address, api_key=secured.keys["acme"])
    with client, pytest.raises(Unavailable):
        client.model_info()
    with pytest.raises(OSError):
        urllib.request.urlopen(secured.http.replace("https", "http") + "/live", timeout=5)


def test_fsck_looks_at_a_cluster_with_certificates(secured: Secured) -> None:
    cluster = with_role_certificate(secured.system.deployment.cluster, secured.certs, "gateway")
    found = asyncio.run(survey(cluster))
    assert {engine.name for engine in found.engines} == {"prefill-0", "decode-0"}
    assert all(engine.ledger and engine.num_published is not None for engine in found.engines)
    plain = asyncio.run(survey(secured.system.deployment.cluster))
    assert all(engine.silence for engine in plain.engines)


# --- file changes ---------------------------------------------------------------------------------


def test_a_key_that_is_taken_out_is_out_at_once(secured: Secured) -> None:
    secured.keys["new"] = add_key(secured.key_file, "new", INFER)
    with secured.client("new") as client:
        assert client.tokenize("x")
        document = json.loads(secured.key_file.read_text())
        document["keys"] = [k for k in document["keys"] if k["tenant"] != "new"]
        secured.key_file.write_text(json.dumps(document))
        with pytest.raises(Unauthenticated):
            client.tokenize("x")


def test_new_certificates_count_for_new_connections(secured: Secured, tmp_path: Path) -> None:
    make_certificates(tmp_path / "new")
    saved = tmp_path / "saved"
    shutil.copytree(secured.certs, saved)
    with secured.client("acme") as before:
        assert before.tokenize("x")
        try:
            for name in ("server.crt", "server.key"):
                shutil.copy(tmp_path / "new" / name, secured.certs / name)
            assert before.tokenize("x"), "what is connected stays"
            with secured.client("acme", tmp_path / "new/ca.crt") as after:
                assert after.tokenize("x")
            with secured.client("acme") as stale, pytest.raises(Unavailable):
                stale.tokenize("x")
        finally:
            for name in ("server.crt", "server.key"):
                shutil.copy(saved / name, secured.certs / name)
