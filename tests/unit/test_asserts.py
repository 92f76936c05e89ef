"""Under `python -O` the product loses its asserts, but the tests must keep theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from node_driver import is_idle

TESTS = Path(__file__).resolve().parents[1]


def test_every_module_of_the_tests_keeps_its_asserts() -> None:
    """pytest rewrites the asserts of test modules and of those that conftest.py names."""
    plain = [
        name
        for name, module in list(sys.modules.items())
        if TESTS in Path(getattr(module, "__file__", None) or "/").parents
        and not isinstance(getattr(module.__spec__, "loader", None), AssertionRewritingHook)
    ]
    assert not plain


def test_what_shared_modules_assert_holds() -> None:
    blocks = {"free": 1, "cached": 0, "held": 0, "reserved": 0, "total": 2}
    with pytest.raises(AssertionError):
        is_idle({"blocks": blocks, "requests": {}, "transfers": {}})
