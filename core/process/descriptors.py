"""How many files and sockets this process may have open (RLIMIT_NOFILE), and who may use them.

half           HTTP connections                       a process without any left could not even
a quarter      gRPC connections                       accept who is to be refused, nor reach a
the rest       links to nodes, Redis, files           node for those whom it serves
"""

from __future__ import annotations

import resource

_HIGHEST = 1 << 20  # what may be unlimited is counted by tables of its size
_MAX_SPARE = 64


def raise_limit() -> None:
    """Take as many as the system gives: the soft limit is there for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _HIGHEST if hard == resource.RLIM_INFINITY else min(hard, _HIGHEST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _HIGHEST if soft == resource.RLIM_INFINITY else soft


def for_http() -> int:
    """Most connections of HTTP."""
    return max(1, limit() // 2)


def for_grpc() -> int:
    """Most connections of gRPC."""
    return max(1, limit() // 4)


def is_among_last(descriptor: int) -> bool:
    """Whether the one that was just opened, which is the lowest that was free, is one of those that
    are spared."""
    return descriptor >= limit() - min(_MAX_SPARE, limit() // 8)
