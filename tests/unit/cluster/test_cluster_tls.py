"""Certificates: created, checked at the start, replaced while a server runs; and the addresses
where it may listen.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from fakes.clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.host.certs import (
    ROLES,
    make_certificates,
    with_role_certificate,
    with_server_certificate,
)
from baton.cluster import tls
from baton.cluster.certificate_times import validities
from baton.cluster.exposure import check_exposure, is_loopback
from baton.cluster.tls import CertificateFiles, ClusterTls, bind, check_peer_role
from baton.core.config import ClusterConfig, GatewayConfig, NodeConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import PermissionDenied, StartupFailed
from baton.core.membership import Role
from baton.core.ports import Clock
from baton.gateway.security.security import Security
from baton.node.supervisor import supervisor


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
    with pytest.raises(StartupFailed, match="cannot make"):
        make_certificates(certs / "ca.crt" / "folder")


def handshake(server: ssl.SSLContext, ca: Path, name: str = "localhost") -> bytes:
    """A handshake in memory; returns the certificate received by the client (DER), or SSLError."""
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


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"days": 0}, "--days"),
        ({"days": 10_000_000}, "--days"),
        ({"hosts": ("",)}, "--hosts"),
        ({"hosts": ("gpu-1 gpu-2",)}, "--hosts"),
        ({"hosts": ("gpu-1:8000",)}, "--hosts"),
        ({"hosts": ("10.0.0.9:8000",)}, "--hosts"),
    ],
)
def test_what_no_certificate_can_say_is_named_before_any_is_made(
    options: Any, flag: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupFailed, match=flag):
        make_certificates(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_the_server_certificate_is_for_the_names_that_were_asked_for(certs: Path) -> None:
    files = CertificateFiles(certs / "server.crt", certs / "server.key", None, "--tls-cert")
    context = files.http_context()
    for name in ("localhost", "127.0.0.1", "::1", "llm.example", "10.0.0.9"):
        handshake(context, certs / "ca.crt", name)  # for an address there is no SNI
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
    assert "the previous one stays in use" in caplog.text
    shutil.copy(tmp_path / "new/server.key", key)
    assert handshake(context, tmp_path / "new/ca.crt") != first
    with pytest.raises(ssl.SSLError):
        handshake(context, certs / "ca.crt")


def test_a_pair_is_read_whole_or_not_at_all(
    certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC's bytes and HTTP's context, which OpenSSL reads from files, are of the same version."""
    pair = (tmp_path / "tls.crt", tmp_path / "tls.key")

    def write(name: str) -> None:
        for path in pair:
            shutil.copy(certs / f"{name}{path.suffix}", path)

    write("prefill")
    files = CertificateFiles(*pair, None, "--tls-cert")
    before = files.current()
    write("decode")
    with monkeypatch.context() as patch:
        make = tls._new_context
        patch.setattr(tls, "_new_context", lambda: (write("server"), make())[1])
        assert files.current() is before
    assert "being written" in caplog.text
    newest = files.current()
    assert newest.chain == (certs / "server.crt").read_bytes()
    shown = handshake(newest.context, certs / "ca.crt")
    assert shown == ssl.PEM_cert_to_DER_cert(newest.chain.decode())


def test_what_could_not_be_read_is_tried_again(
    certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = (tmp_path / "tls.crt", tmp_path / "tls.key")
    for path in pair:
        shutil.copy(certs / f"prefill{path.suffix}", path)
    files = CertificateFiles(*pair, None, "--tls-cert")
    before = files.current()
    for path in pair:
        shutil.copy(certs / f"server{path.suffix}", path)
    with monkeypatch.context() as patch:
        failure = OSError(errno.EMFILE, "Too many open files", str(pair[0]))
        patch.setattr(Path, "read_bytes", Mock(side_effect=failure))
        assert files.current() is before
    assert files.current().chain == (certs / "server.crt").read_bytes()


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


def clock_at(unix_s: float) -> FakeClock:
    clock = FakeClock()
    clock.advance(unix_s - clock.unix_ns() / 1e9)
    return clock


def from_and_until(path: Path) -> tuple[float, float]:
    """The validity of the first certificate, as read by OpenSSL."""
    shown = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]
    first, last = (ssl.cert_time_to_seconds(shown[name]) for name in ("notBefore", "notAfter"))
    return first, last


def test_times_are_those_that_openssl_reads(certs: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "long", days=40 * 365)  # past 2049: another time format
    for path in (certs / "server.crt", certs / "ca.crt", tmp_path / "long/gateway.crt"):
        (found,) = validities(path.read_bytes())
        assert (found.from_s, found.until_s) == from_and_until(path)
    both = (certs / "server.crt").read_bytes() + b"text\n" + (certs / "ca.crt").read_bytes()
    assert len(validities(both)) == 2


@given(st.binary(max_size=120) | st.binary(max_size=60).map(lambda b: b"\x30\x3c\x30\x3a" + b))
def test_junk_in_place_of_a_certificate_is_a_value_error(der: bytes) -> None:
    with pytest.raises(ValueError):
        validities(ssl.DER_cert_to_PEM_cert(der).encode())


def test_a_certificate_whose_time_is_not_now_stops_the_start(certs: Path) -> None:
    first_s, last_s = from_and_until(certs / "server.crt")
    pair, ca = (certs / "server.crt", certs / "server.key"), certs / "ca.crt"
    for now_s, printed in ((first_s - 1, "server.crt is not valid before"), (last_s, "expired on")):
        with pytest.raises(StartupFailed, match=printed) as raised:
            CertificateFiles(*pair, None, "--tls-cert", clock_at(now_s))
        assert raised.value.message.startswith("--tls-cert: ")
    CertificateFiles(*pair, None, "--tls-cert", clock_at(first_s))
    ca_s = from_and_until(ca)[1]
    files = CertificateFiles(*pair, ca, "--tls-cert", clock_at(min(last_s, ca_s) - 1))
    assert files.current().ends_s == {str(pair[0]): last_s, str(ca): ca_s}


def test_cluster_and_server_alike(certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = clock_at(from_and_until(certs / "gateway.crt")[1] + 1)
    monkeypatch.setattr(tls, "Clock", lambda: late)
    cluster = with_role_certificate(ClusterConfig(), certs, "gateway")
    with pytest.raises(StartupFailed, match=r"--cluster-cert, .*gateway\.crt expired"):
        ClusterTls.of(cluster)
    gateway = with_server_certificate(GatewayConfig(), certs)
    with pytest.raises(StartupFailed, match=r"--tls-cert, .*server\.crt expired"):
        Security.of(gateway, ClusterConfig(), Clock())


def test_a_ca_file_counts_while_one_in_it_does(certs: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "new", days=200)
    both = tmp_path / "both.crt"
    both.write_bytes((certs / "ca.crt").read_bytes() + (tmp_path / "new/ca.crt").read_bytes())
    new = (tmp_path / "new/gateway.crt", tmp_path / "new/gateway.key")
    clock = clock_at(from_and_until(certs / "ca.crt")[1] + 1)
    files = CertificateFiles(*new, both, "x", clock)
    assert files.current().ends_s[str(both)] == from_and_until(tmp_path / "new/ca.crt")[1]
    with pytest.raises(StartupFailed, match=r"ca\.crt has no CA that is valid now"):
        CertificateFiles(*new, certs / "ca.crt", "x", clock)


@pytest.mark.parametrize("is_authority", [False, True])
def test_a_renewed_certificate_counts_from_the_moment_that_it_is_valid(
    certs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_authority: bool
) -> None:
    """A renewed certificate is used once it is valid, as the CA's clock may be ahead of ours."""
    paths = [tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt")]
    for path, name in zip(paths, ("server.crt", "server.key", "ca.crt"), strict=True):
        shutil.copy(certs / name, path)
    make_certificates(tmp_path / "new")
    shown = paths[2] if is_authority else paths[0]
    # A second may pass between the creation of the two.
    from_s = max(from_and_until(tmp_path / "new" / name)[0] for name in ("ca.crt", "server.crt"))
    files = CertificateFiles(*paths, "x", clock_at(from_s))
    first = files.current()
    files._clock = clock = clock_at(from_s - 5)
    names = ["ca.crt"] if is_authority else ["server.crt", "server.key", "ca.crt"]
    for name in names:
        shutil.copy(tmp_path / "new" / name, tmp_path / name.replace("server", "tls"))
    for _ in range(3):
        assert files.current() is first
    assert caplog.text.count("the previous one stays in use") == 1
    clock.advance(5)
    assert files.current() is not first
    assert shown.read_bytes() in (files.current().chain, files.current().ca)


def test_the_last_two_weeks_are_warned_of_until_the_file_is_renewed(
    certs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    chain, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    shutil.copy(certs / "server.crt", chain)
    shutil.copy(certs / "server.key", key)
    last_s = from_and_until(chain)[1]
    clock = clock_at(last_s - 14 * 86400 - 1)
    files = CertificateFiles(chain, key, None, "--tls-cert", clock)
    files.warn_of_end()
    assert not caplog.records
    clock.advance(1)
    files.warn_of_end()
    assert caplog.records[-1].levelname == "WARNING"
    assert f"{chain}: expires on " in caplog.text
    clock.advance(14 * 86400)
    files.warn_of_end()
    assert caplog.records[-1].levelname == "ERROR"
    assert "expired on" in caplog.records[-1].getMessage()
    make_certificates(tmp_path / "new", days=400)
    for end in ("key", "crt"):
        shutil.copy(tmp_path / f"new/server.{end}", tmp_path / f"tls.{end}")
    caplog.clear()
    files.warn_of_end()
    assert [record.levelname for record in caplog.records] == ["INFO"], "reloaded"
    assert files.current().ends_s == {str(chain): from_and_until(chain)[1]}


async def test_they_are_looked_at_once_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)
        if len(slept_s) == 3:
            raise asyncio.CancelledError

    files = Mock()
    monkeypatch.setattr(tls.asyncio, "sleep", sleep)  # type: ignore[attr-defined]
    with pytest.raises(asyncio.CancelledError):
        await tls.watch_ends((files,))
    assert slept_s == [86400.0] * 3
    assert files.warn_of_end.call_count == 3


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


# --- addresses to listen on -----------------------------------------------------------------------


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
        Security.of(config, ClusterConfig(), Clock())
    for name, flag in flags.items():
        assert (flag in raised.value.message) == (name not in given)


def test_with_the_loud_flag_a_gateway_may_lie_open(caplog: pytest.LogCaptureFixture) -> None:
    config = GatewayConfig(host="0.0.0.0", insecure_bind=True)
    assert Security.of(config, ClusterConfig(), Clock()).certificate is None
    assert "--api-keys" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"], ids=["taken", "another host's"])
async def test_who_cannot_listen_says_so_in_words_of_its_own(
    host: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupFailed, match=f"cannot listen on {host}:{port}"):
            bind(grpc.aio.server(), host, port, None, flag="--port")
    assert capfd.readouterr().err == ""
