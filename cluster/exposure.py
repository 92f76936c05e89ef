"""Checks of a deployment's exposure: the addresses it listens on, the strength of its secret."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence

from ..core.config import ClusterConfig
from ..core.errors import StartupFailed
from .secret import MIN_SECRET_CHARS, ClusterSecret

log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether only users of this host can reach a server that listens on `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: it may resolve to anything


def check_exposure(who: str, host: str, missing: Sequence[str], *, is_accepted: bool) -> None:
    """Raise StartupFailed if `who` would listen on the network without the `missing` flags.

    `is_accepted`: the operator accepts the risk; it is then logged once, as a warning.
    """
    if not missing or is_loopback(host):
        return
    if is_accepted:
        log.warning(
            "INSECURE: the %s listens on %s without %s: whoever reaches it can use it or listen in",
            *(who, host, ", ".join(missing)),
        )
        return
    raise StartupFailed(
        f"the {who} would listen on {host} for the whole network without {', '.join(missing)}",
        hint="give them, or --insecure-bind where the network itself is the boundary",
    )


def check_secret(who: str, cluster: ClusterConfig) -> None:
    """Log a warning if the cluster has no secret, or one that can be guessed."""
    secrets = ClusterSecret.of(cluster).accepted
    if not secrets:
        open_to = "writes to its Redis" if cluster.cluster_ca else "reaches its Redis or a port"
        log.warning(
            "INSECURE: this %s has no cluster secret: anyone who %s can impersonate a part of "
            "the cluster; set BATON_CLUSTER_SECRET",
            *(who, open_to),
        )
    elif min(map(len, secrets)) < MIN_SECRET_CHARS:
        log.warning(
            "INSECURE: the cluster secret has fewer than %d characters: anyone who records a "
            "handshake can guess it; `openssl rand -hex 16` makes a good one",
            MIN_SECRET_CHARS,
        )
