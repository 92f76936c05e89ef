"""How many files and sockets this process may have open (RLIMIT_NOFILE), and their division.

half           HTTP connections                       without a free descriptor a process could
a quarter      gRPC connections                       neither accept connections to refuse them,
the rest       links to nodes, Redis, files           nor connect to a node for its callers
"""

from __future__ import annotations

import resource

_HIGHEST = 1 << 20  # instead of no limit: the limit sizes tables
_MAX_SPARE = 64


def raise_limit() -> None:
    """Raise the soft limit to the hard one: it is kept low for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _HIGHEST if hard == resource.RLIM_INFINITY else min(hard, _HIGHEST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _HIGHEST if soft == resource.RLIM_INFINITY else soft


def for_http() -> int:
    """The most HTTP connections."""
    return max(1, limit() // 2)


def for_grpc() -> int:
    """The most gRPC connections."""
    return max(1, limit() // 4)


def is_among_last(descriptor: int) -> bool:
    """Whether `descriptor`, just opened and so the lowest free number, is one of the last, which
    are reserved."""
    return descriptor >= limit() - min(_MAX_SPARE, limit() // 8)
