"""Certificates: made, checked at the beginning, changed under a server; and where it may listen."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from baton.cli.certs import ROLES, make_certificates
from baton.cluster.exposure import check_exposure, is_loopback
from baton.cluster.tls import CertificateFiles, ClusterTls, check_peer_role
from baton.core.config import ClusterConfig, EngineConfig, GatewayConfig, NodeConfig
from baton.core.errors import PermissionDenied, StartupFailed
from baton.core.membership import Role
from baton.core.ports import SystemClock
from baton.gateway.security.setup import Security
from baton.node import supervisor


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "made"
    make_certificates(folder, ("llm.example", "10.0.0.9"))
    return folder


def test_keys_are_their_owner_s_to_read(certs: Path) -> None:
    names = {path.name for path in certs.iterdir()}
    assert names == {f"{n}.{end}" for n in ("ca", *ROLES, "server") for end in ("crt", "key")}
    assert all(path.stat().st_mode & 0o077 == 0 for path in certs.glob("*.key"))
    with pytest.raises(StartupFailed, match="not empty"):
        make_certificates(certs)


def handshake(server: ssl.SSLContext, ca: Path, name: str = "localhost") -> bytes:
    """A whole handshake in memory; the certificate that the client saw, DER. Raises SSLError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=str(ca))
    client = context.wrap_bio(to_client, to_server, server_hostname=name)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    todo = [client.do_handshake, other.do_handshake]
    for _ in range(10):
        for step in list(todo):
            try:
                step()
            except ssl.SSLWantReadError:
                continue
            todo.remove(step)
    assert not todo
    seen = client.getpeercert(binary_form=True)
    assert seen is not None
    return seen


def test_the_server_certificate_is_for_the_names_that_were_asked_for(certs: Path) -> None:
    files = CertificateFiles(certs / "server.crt", certs / "server.key", None, "--tls-cert")
    context = files.http_context()
    for name in ("localhost", "127.0.0.1", "::1", "llm.example", "10.0.0.9"):
        handshake(context, certs / "ca.crt", name)  # an address comes without SNI
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(context, certs / "ca.crt", "evil.example")


def test_a_new_certificate_counts_from_the_next_handshake_on(
    certs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    shutil.copy(certs / "server.crt", chain)
    shutil.copy(certs / "server.key", key)
    files = CertificateFiles(chain, key, None, "--tls-cert, --tls-key")
    context = files.http_context()
    first = handshake(context, certs / "ca.crt")
    make_certificates(tmp_path / "new")
    shutil.copy(tmp_path / "new/server.crt", chain)
    assert handshake(context, certs / "ca.crt") == first, "half of a pair is none"
    assert "the one before stays" in caplog.text
    shutil.copy(tmp_path / "new/server.key", key)
    assert handshake(context, tmp_path / "new/ca.crt") != first
    with pytest.raises(ssl.SSLError):
        handshake(context, certs / "ca.crt")


def test_files_that_are_no_pair_stop_the_start(certs: Path, tmp_path: Path) -> None:
    def load(chain: Path, key: Path) -> None:
        CertificateFiles(chain, key, None, "--tls-cert, --tls-key")

    empty = tmp_path / "empty"
    empty.write_text("")
    for chain, key in (
        (certs / "server.crt", certs / "gateway.key"),
        (certs / "missing.crt", certs / "server.key"),
        (empty, certs / "server.key"),
        (certs / "server.key", certs / "server.crt"),
    ):
        with pytest.raises(StartupFailed, match="--tls-cert, --tls-key"):
            load(chain, key)


def test_an_encrypted_key_is_refused_and_asks_nobody(certs: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", str(certs / "server.key"), "-out", str(locked)]
    subprocess.run([*command, "-passout", "pass:secret"], check=True, timeout=30)
    with pytest.raises(StartupFailed, match="the key is encrypted"):
        CertificateFiles(certs / "server.crt", locked, None, "--tls-cert, --tls-key")


def test_flags_that_belong_together() -> None:
    for config in (
        lambda: ClusterConfig(cluster_ca="ca"),
        lambda: ClusterConfig(cluster_cert="c", cluster_key="k"),
        lambda: GatewayConfig(tls_cert="c"),
        lambda: GatewayConfig(tls_key="k"),
    ):
        with pytest.raises(StartupFailed, match="belong together"):
            config()
    assert ClusterTls.of(ClusterConfig()) is None


class _Context:
    def __init__(self, *names: bytes) -> None:
        self._names = names

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {"x509_subject_alternative_name": self._names} if self._names else {}


def test_the_role_is_in_the_certificate_s_names() -> None:
    check_peer_role(_Context(b"10.0.0.1", b"gateway.baton.internal"), "gateway")
    for context in (
        _Context(),
        _Context(b"decode.baton.internal"),
        _Context(b"gateway.baton.internal.evil.example"),
        _Context(b"*.baton.internal"),
    ):
        with pytest.raises(PermissionDenied, match="role gateway"):
            check_peer_role(context, "gateway")


# --- where to listen ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("", False), ("10.0.0.1", False), ("myhost", False),
     ("localhost.example", False), ("127.0.0.1.example", False)],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_beyond_this_host_only_when_protected_or_said_so_loudly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_exposure("node", "127.0.0.1", ("--x",), is_accepted=False)
    check_exposure("node", "0.0.0.0", (), is_accepted=False)
    with pytest.raises(StartupFailed, match="--x") as raised:
        check_exposure("node", "0.0.0.0", ("--x",), is_accepted=False)
    assert "--insecure-bind" in raised.value.hint
    assert not caplog.records
    check_exposure("node", "0.0.0.0", ("--x",), is_accepted=True)
    assert "INSECURE" in caplog.text


@pytest.mark.parametrize("secret", [None, "secret"])
def test_a_node_needs_certificates_beyond_this_host(secret: str | None) -> None:
    start = supervisor.run(
        Role.PREFILL,
        EngineConfig(),
        NodeConfig(host="0.0.0.0"),
        ClusterConfig(cluster_secret=secret),
    )
    with pytest.raises(StartupFailed, match=r"prefill node would listen .* --cluster-ca"):
        asyncio.run(start)


@pytest.mark.parametrize("given", [(), ("tls_cert", "tls_key"), ("api_keys",)])
def test_a_gateway_names_what_is_missing(given: tuple[str, ...]) -> None:
    config = GatewayConfig(host="0.0.0.0", **dict.fromkeys(given, "file"))
    flags = {"tls_cert": "--tls-cert", "tls_key": "--tls-key", "api_keys": "--api-keys"}
    with pytest.raises(StartupFailed) as raised:
        Security.of(config, ClusterConfig(), SystemClock())
    for name, flag in flags.items():
        assert (flag in raised.value.message) == (name not in given)


def test_with_the_loud_flag_a_gateway_may_lie_open(caplog: pytest.LogCaptureFixture) -> None:
    config = GatewayConfig(host="0.0.0.0", insecure_bind=True)
    assert Security.of(config, ClusterConfig(), SystemClock()).certificate is None
    assert "--api-keys" in caplog.text
