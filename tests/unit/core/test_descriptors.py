"""RLIMIT_NOFILE: raised at the start, divided among uses, with a reserve."""

from __future__ import annotations

import resource

import pytest

from baton.core.process import descriptors

_UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((4096, 4096), None),
        ((1024, _UNLIMITED), (1 << 20, _UNLIMITED)),
        ((_UNLIMITED, _UNLIMITED), None),
        ((1024, 1 << 30), (1 << 20, 1 << 30)),
    ],
)
def test_the_limit_is_raised(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int] | None
) -> None:
    changes: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changes.append(limits))
    descriptors.raise_limit()
    assert changes == ([] if after is None else [after])


@pytest.mark.parametrize("limit", [64, 256, 1024, 20_000])
def test_what_is_shared_out_leaves_some(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    spared = sum(descriptors.is_among_last(number) for number in range(limit))
    assert 8 <= spared <= 64
    assert descriptors.for_http() + descriptors.for_grpc() + spared < limit
