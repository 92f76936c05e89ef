"""How many examples a property is tried with: few in `make test`, more in `make test-all`.

In `make test` they are the same in each run, so that a failure is of a change, not of chance;
`make test-all` draws new ones. tests/conftest.py loads the profile before any test module.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings

QUICK, THOROUGH = "quick", "thorough"


def register_profiles() -> None:
    """No deadlines: an example may meet a busy machine."""
    settings.register_profile(QUICK, max_examples=40, deadline=None, derandomize=True)
    settings.register_profile(THOROUGH, deadline=None)
    settings.load_profile(QUICK)


def examples(quick: int, thorough: int, **more: Any) -> settings:
    """Settings for a test that cannot do with the profile's own number of examples."""
    is_quick = bool(settings().derandomize)
    return settings(max_examples=quick if is_quick else thorough, **more)
