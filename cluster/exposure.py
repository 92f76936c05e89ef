"""May a server listen where it was told to? On loopback always; elsewhere only when protected."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence

from ..core.errors import StartupFailed

log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether nobody but this host's users can reach a server that listens there."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: it may resolve to anything


def check_exposure(who: str, host: str, missing: Sequence[str], *, is_accepted: bool) -> None:
    """Raise StartupFailed if `who` would listen for the network without the `missing` flags.

    `is_accepted`: the operator takes the risk; then it is said once, loudly.
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
