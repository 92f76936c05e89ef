"""`baton certs`: makes a CA and a certificate for each role with the openssl command; and the flags
by which the parts of a deployment find them.

    DIR/ca.crt ca.key      the CA; its key allows to make certificates of a gateway
    DIR/gateway.crt .key   prefill, decode too: one role's, for --cluster-cert and --cluster-key
    DIR/server.crt .key    the gateway's towards clients, for --tls-cert and --tls-key
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...cluster.tls import GATEWAY, role_name
from ...core.config import ClusterConfig, GatewayConfig
from ...core.errors import StartupFailed
from ...core.membership import Role

SERVER = "server"
ROLES = (GATEWAY, *(role.value for role in Role))
_TIMEOUT_S = 30.0
_MAX_DAYS = 36500
_NAME = re.compile(r"[\w.*-]+", re.ASCII)

_CONFIG = """\
[req]
distinguished_name = name
x509_extensions = extensions
prompt = no
[name]
CN = {name}
[extensions]
basicConstraints = critical, CA:{is_ca}
keyUsage = critical, {key_usage}
subjectKeyIdentifier = hash
{more}
"""


def run(folder: Path, hosts: Sequence[str], days: int) -> int:
    """Make all files and print how to use them; raises StartupFailed."""
    make_certificates(folder, hosts, days)
    print(f"made in {folder}, valid for {days} days: a CA, {', '.join(ROLES)}, {SERVER}")
    print(f"  baton up --certs {folder}")
    print(f"  baton chat --address HOST:PORT --ca-file {folder / 'ca.crt'}")
    return 0


def make_certificates(folder: Path, hosts: Sequence[str] = (), days: int = 90) -> None:
    """Fill an empty or new folder; raises StartupFailed."""
    if not 1 <= days <= _MAX_DAYS:
        raise StartupFailed(f"--days is 1 to {_MAX_DAYS}, not {days}")
    for name in hosts:
        _alt_name(name)  # check before any file is made
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupFailed(f"cannot make {folder}: {error}", hint="another folder") from error
    if any(folder.iterdir()):
        raise StartupFailed(f"{folder} is not empty", hint="an empty or new folder")
    ca = folder / "ca"
    _make(ca, "Baton CA", "keyCertSign, cRLSign", "", days, ca=None)
    sign_certificates(folder, ca, hosts, days)


def sign_certificates(folder: Path, ca: Path, hosts: Sequence[str] = (), days: int = 90) -> None:
    """Fill `folder` with a new key and certificate for each role and for the server, signed by the
    CA whose files begin with `ca`; raises StartupFailed."""
    for role in ROLES:
        more = f"extendedKeyUsage = clientAuth, serverAuth\nsubjectAltName = DNS:{role_name(role)}"
        _make(folder / role, role, "digitalSignature", more, days, ca)
    names = dict.fromkeys(("localhost", "127.0.0.1", "::1", socket.gethostname(), *hosts))
    more = f"extendedKeyUsage = serverAuth\nsubjectAltName = {','.join(map(_alt_name, names))}"
    _make(folder / SERVER, "Baton gateway", "digitalSignature", more, days, ca)


def ca_of(folder: str | None) -> Path | None:
    """The CA file for clients of a deployment with these certificates."""
    return None if folder is None else Path(folder) / "ca.crt"


def with_server_certificate(config: GatewayConfig, folder: Path) -> GatewayConfig:
    """The gateway's configuration with its TLS files, unless it has some."""
    return replace(
        config,
        tls_cert=config.tls_cert or str(folder / f"{SERVER}.crt"),
        tls_key=config.tls_key or str(folder / f"{SERVER}.key"),
    )


def with_role_certificate(config: ClusterConfig, folder: Path, role: str) -> ClusterConfig:
    """The cluster's configuration with the TLS files of `role`."""
    return replace(
        config,
        cluster_ca=str(folder / "ca.crt"),
        cluster_cert=str(folder / f"{role}.crt"),
        cluster_key=str(folder / f"{role}.key"),
    )


def _make(target: Path, name: str, key_usage: str, more: str, days: int, ca: Path | None) -> None:
    """Make a key, readable by its owner only, and a certificate, signed by `ca` or by itself."""
    config = _CONFIG.format(
        name=name, is_ca="FALSE" if ca else "TRUE", key_usage=key_usage, more=more
    )
    arguments = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    arguments += ["-sha256", "-days", str(days), "-out", f"{target}.crt"]
    arguments += ["-keyout", f"{target}.key"]
    if ca is not None:
        arguments += ["-CA", f"{ca}.crt", "-CAkey", f"{ca}.key"]
    with tempfile.NamedTemporaryFile("w", suffix=".cnf") as file:
        file.write(config)
        file.flush()
        _openssl([*arguments, "-config", file.name])
    os.chmod(f"{target}.key", 0o600)


def _openssl(arguments: Sequence[str]) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise StartupFailed("there is no openssl command on this host", hint="install openssl 3")
    result = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if result.returncode:
        message = (result.stderr.strip().splitlines() or ["nothing"])[-1]
        raise StartupFailed(f"openssl failed: {message}", hint="openssl 3 or newer is needed")


def _alt_name(name: str) -> str:
    """An address or a DNS name in the form of a subjectAltName; raises StartupFailed."""
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        if _NAME.fullmatch(name):
            return f"DNS:{name}"
    hint = "names separated by commas, without ports"
    raise StartupFailed(f"--hosts: {name!r} is no name or address", hint=hint)
