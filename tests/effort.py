"""The number of examples per property, and the length of random runs: few and short in `make test`,
more in `make test-all`.

In `make test` they are the same in each run, so that a failure is due to a change, not to chance;
`make test-all` draws new ones. tests/conftest.py loads the profile before any test module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

QUICK, THOROUGH = "quick", "thorough"


def register_profiles() -> None:
    """No deadlines: an example may meet a busy machine."""
    settings.register_profile(QUICK, max_examples=40, deadline=None, derandomize=True)
    settings.register_profile(THOROUGH, deadline=None)
    settings.load_profile(QUICK)


def examples(quick: int, thorough: int, **more: Any) -> settings:
    """Settings for a test that needs another number of examples than the profile's."""
    return settings(max_examples=number(quick, thorough), **more)


def number(quick: int, thorough: int) -> int:
    """The number of seeds, rounds or tokens of a test that draws them itself."""
    return quick if settings().derandomize else thorough


def half(*values: Iterable[Any], is_whole: bool = False) -> list[Any]:
    """All combinations, for `parametrize`; every second one is `slow`, unless `is_whole`.

    Each value is in those that are not slow, and of three parameters or more each pair of values.
    """
    return [
        pytest.param(
            *(value for _, value in chosen),
            marks=pytest.mark.slow if sum(n for n, _ in chosen) % 2 and not is_whole else (),
        )
        for chosen in itertools.product(*map(enumerate, values))
    ]
