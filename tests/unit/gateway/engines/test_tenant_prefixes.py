"""Tenants never hit each other's cached prefixes, in engines or in routing; each hits its own."""

from __future__ import annotations

from fakes.clock import FakeClock
from fakes.gateway.engine_link import FakeLink
from fakes.gateway.requests import valid
from fakes.handoff.block_pairs import unpacked
from fakes.runner import FakeRunner

from baton.core.membership import Member, Role
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.request.engine_link import Avoid, Demand
from baton.gateway.security.caller import INFER, Caller
from baton.gateway.security.tenancy import Tenancy
from baton.prefix_index.messages import Delta, encode
from baton.prefix_index.mirror import PrefixMirror
from baton.proto import codec

BLOCK_SIZE, NUM_BLOCKS = 4, 60 + NUM_RESERVED_BLOCKS
PROMPT = tuple(range(1, 30))
TENANCY = Tenancy(FakeClock(), b"key of the deployment")


def salt(tenant: str, requested: str = "", tenancy: Tenancy = TENANCY) -> str:
    return tenancy.cache_salt(Caller(tenant, frozenset({INFER}), "http"), requested)


def new_engine() -> Engine:
    return Engine(
        EngineParts(
            FakeRunner(NUM_BLOCKS, BLOCK_SIZE, vocab_size=50),
            EngineLimits(NUM_BLOCKS, BLOCK_SIZE, max_model_len=200, max_num_batched_tokens=64),
            Generations(NUM_BLOCKS),
            fingerprint="fp",
            eos_token_ids={0},
        )
    )


def cached_tokens(engine: Engine, name: str, cache_salt: str) -> int:
    """The number of cached prompt tokens for a request that carries this salt over the wire."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    request = Request(name, 0, PROMPT, sampling, cache_salt=cache_salt)
    wire = codec.dispatch_to_wire(request, None, 1.0)
    engine.add(codec.request_from_wire(wire), hold=True)
    found = 0
    while engine.has_work:
        for num_cached in engine.step().started.values():
            found = num_cached
    engine.abort(request.key)
    return found


def test_an_engine_s_cache_is_each_tenant_s_own() -> None:
    engine, whole = new_engine(), len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
    assert cached_tokens(engine, "a", salt("acme")) == 0
    assert cached_tokens(engine, "b", salt("acme")) == whole
    assert cached_tokens(engine, "c", salt("globex")) == 0
    assert cached_tokens(engine, "d", salt("acme", "s")) == 0
    assert cached_tokens(engine, "e", salt("acme", "s")) == whole
    assert cached_tokens(engine, "f", salt("globex", "s")) == 0
    assert cached_tokens(engine, "g", "") == 0, "nor with those of a gateway without keys"
    sharing = Tenancy(FakeClock(), b"key of the deployment", shares_prefixes=True)
    assert salt("acme", tenancy=sharing) == salt("globex", tenancy=sharing) == ""


async def test_routing_looks_where_the_engine_would() -> None:
    """A gateway queries the index with the hashes that the engine published."""
    engine = new_engine()
    request = Request("a", 0, PROMPT, SamplingParams(max_tokens=2), cache_salt=salt("acme"))
    engine.add(request, hold=True)
    while engine.has_work:
        engine.step()
    refs = engine.block_refs(request.key, 0, len(PROMPT) // BLOCK_SIZE)
    published = tuple(ref.hash for ref in unpacked(refs) if ref.hash is not None)
    table = EngineTable(PrefixMirror(FakeClock()))
    ids = {Role.PREFILL: "aa" * 16, Role.DECODE: "dd" * 16}
    load = ReportedLoad(0, 0, 0, 100, 50, False, frozenset({ids[Role.PREFILL]}))
    for role, incarnation in ids.items():
        member = Member(incarnation, role, "n", "h:1", "demo", "fp", 200, BLOCK_SIZE, NUM_BLOCKS)
        table.add(LinkedEngine(member, FakeLink(incarnation), load))
        stored = published if role is Role.PREFILL else ()
        table.mirror.take(encode(Delta(incarnation, 1, (), stored)))

    async def expected(tenant: str) -> int:
        router = PromptRouter(table, valid(PROMPT, cache_salt=salt(tenant)))
        await router.hash_prompt()
        route = router.choose(Demand(len(PROMPT)), avoid=Avoid(), fingerprint=None)
        return route.cached_tokens[0]

    assert await expected("acme") == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
    assert await expected("globex") == 0
