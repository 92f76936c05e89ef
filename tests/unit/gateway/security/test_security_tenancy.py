"""Limits of tenants, and their parts of the prefix cache."""

from __future__ import annotations

import pytest
from fakes.clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import RateLimited
from baton.gateway.security.caller import INFER, Caller, Limits, anyone
from baton.gateway.security.tenancy import Tenancy


def caller(tenant: str = "acme", **limits: int) -> Caller:
    return Caller(tenant, frozenset({INFER}), "http", None, Limits(**limits))


# --- limits ---------------------------------------------------------------------------------------


def test_requests_per_minute_are_each_tenant_s_own() -> None:
    clock = FakeClock()
    tenancy = Tenancy(clock, b"k")
    for _ in range(3):
        with tenancy.admitted(caller(requests_per_minute=3)):
            pass
    with pytest.raises(RateLimited) as raised, tenancy.admitted(caller(requests_per_minute=3)):
        pass
    assert raised.value.retry_after_s == pytest.approx(20.0)
    with tenancy.admitted(caller("globex", requests_per_minute=3)):
        pass
    clock.advance(20.0)
    with tenancy.admitted(caller(requests_per_minute=3)):
        pass


def test_requests_at_once() -> None:
    tenancy = Tenancy(FakeClock(), b"k")
    one = caller(max_concurrent_requests=1)
    with (
        tenancy.admitted(one),
        pytest.raises(RateLimited, match="1 requests at once"),
        tenancy.admitted(one),
    ):
        pass
    with pytest.raises(ValueError), tenancy.admitted(one):
        raise ValueError("a request that fails leaves too")
    with tenancy.admitted(one):
        pass


def test_tokens_are_charged_by_what_may_come_and_settled_by_what_came() -> None:
    tenancy = Tenancy(FakeClock(), b"k")
    limited = caller(tokens_per_minute=100)
    with tenancy.admitted(limited) as admission:
        admission.charge(90)
        with tenancy.admitted(limited) as another, pytest.raises(RateLimited):
            another.charge(20)
        admission.used_tokens = 30
    with tenancy.admitted(limited) as admission:
        admission.charge(70)
        admission.used_tokens = 70
    with pytest.raises(RateLimited) as raised, tenancy.admitted(limited):
        pass  # refused before its prompt is processed
    assert raised.value.retry_after_s == pytest.approx(0.6)


def test_limits_may_change_while_requests_run() -> None:
    tenancy = Tenancy(FakeClock(), b"k")
    with tenancy.admitted(caller(requests_per_minute=100)):
        pass
    with tenancy.admitted(caller(requests_per_minute=1)):
        pass
    with pytest.raises(RateLimited), tenancy.admitted(caller(requests_per_minute=1)):
        pass
    with tenancy.admitted(caller()):
        pass


def test_without_keys_there_is_no_limit() -> None:
    tenancy = Tenancy(FakeClock(), b"k")
    for _ in range(1000):
        with tenancy.admitted(anyone("grpc")) as admission:
            admission.charge(10**9)


# --- cache salts ----------------------------------------------------------------------------------

TENANTS = st.text("abc1.", min_size=1, max_size=5)
SALTS = st.text("abc1.", max_size=5)


@given(TENANTS, SALTS, TENANTS, SALTS, st.booleans())
def test_salts_are_equal_only_for_one_tenant_and_one_salt(
    tenant: str, salt: str, other: str, other_salt: str, shares: bool
) -> None:
    tenancy = Tenancy(FakeClock(), b"key of the deployment", shares_prefixes=shares)
    mine = tenancy.cache_salt(caller(tenant), salt)
    theirs = tenancy.cache_salt(caller(other), other_salt)
    is_shared = shares and not salt and not other_salt
    assert (mine == theirs) == (is_shared or (tenant, salt) == (other, other_salt))
    assert salt == "" or salt not in mine or len(salt) < 3, "a client does not choose it"


def test_gateways_of_a_deployment_agree_and_of_another_do_not() -> None:
    first, second, foreign = (Tenancy(FakeClock(), key) for key in (b"k", b"k", b"other"))
    assert first.cache_salt(caller(), "s") == second.cache_salt(caller(), "s")
    assert first.cache_salt(caller(), "s") != foreign.cache_salt(caller(), "s")


def test_without_keys_all_is_one_tenant() -> None:
    tenancy = Tenancy(FakeClock(), b"k")
    assert tenancy.cache_salt(anyone("grpc"), "") == ""
    assert tenancy.cache_salt(anyone("grpc"), "s") not in {"", "s"}
    assert tenancy.cache_salt(anyone("grpc"), "s") != tenancy.cache_salt(caller(), "s")
