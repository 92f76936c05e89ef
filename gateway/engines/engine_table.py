"""All engines that the gateway is linked to, and what follows from all of them together.

Knows no grpc and no directory: cluster_view.py adds and removes engines, prompt_router.py chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...core.membership import Role
from ...core.step_cost import StepCost
from ...prefix_index.mirror import PrefixMirror
from ...prefix_index.prefix_sources import NOTHING, CachedPrefix, Fetch, Holders
from ..request.engine_link import Avoid
from ..request.suspects import Suspects
from ..validation.served_model import ModelLimits
from .linked_engine import LinkedEngine
from .plan_record import PlanRecord
from .prompts_in_flight import PromptsInFlight
from .routing import Policy


class EngineTable:
    """The linked engines by incarnation, from the first heartbeat to the end of the stream, and the
    mirror of their parts of the prefix index.

    `policy`: how engines are chosen; the default takes the least estimate and draws nothing, so
    that gateways with the same heartbeats choose the same.
    """

    def __init__(self, mirror: PrefixMirror, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.plans = PlanRecord()
        self.engines: dict[str, LinkedEngine] = {}
        self.mirror = mirror
        self.prompts = PromptsInFlight(mirror.clock)
        self.suspects = Suspects()
        self.released: set[int] = set()  # callers, over all engines: see EngineAccount

    def add(self, engine: LinkedEngine) -> None:
        """Add an engine whose first heartbeat has come."""
        engine.account.released, engine.account.prompts = self.released, self.prompts
        self.engines[engine.incarnation] = engine
        num_blocks = engine.member.num_blocks + engine.welcome.num_host_blocks
        self.mirror.add(engine.incarnation, num_blocks)

    def remove(self, incarnation: str) -> None:
        """Remove an engine whose stream has ended; no error if it was removed before."""
        self.engines.pop(incarnation, None)
        self.prompts.engine_lost(incarnation)
        self.mirror.remove(incarnation)

    def fetches(self, cached: Mapping[str, CachedPrefix], avoid: Avoid) -> Mapping[str, Fetch]:
        """The best fetch of each engine that could get more of a prompt's full blocks from another
        one, by incarnation. `cached`: what engines have of the prompt, likewise."""
        lendable: dict[str, dict[str, int]] = {}  # tokens by fingerprint and incarnation
        for name, prefix in cached.items():
            if name not in avoid:
                of_kind = lendable.setdefault(self.engines[name].fingerprint, {})
                of_kind[name] = prefix.lendable_tokens
        if not lendable:
            return {}
        rates = {name: engine.load.link_gbytes_per_s for name, engine in self.engines.items()}
        holders = {kind: Holders.of(tokens, rates) for kind, tokens in lendable.items()}
        found: dict[str, Fetch] = {}
        for name, engine in self.engines.items():
            alike, block_bytes = holders.get(engine.fingerprint), engine.welcome.block_bytes
            if alike is not None and block_bytes and engine.takes_prompts:
                own, token_bytes = cached.get(name, NOTHING), block_bytes / engine.member.block_size
                own_tokens = own.num_tokens - own.host_tokens
                if (fetch := alike.best_fetch(name, own_tokens, token_bytes)) is not None:
                    found[name] = fetch
        return found

    def step_costs(self) -> Mapping[str, StepCost]:
        """By fingerprint, the step cost that was measured on the largest steps, for engines that
        have not measured their own; nothing if all have."""
        found: dict[str, StepCost] = {}
        if all(engine.is_measured for engine in self.engines.values()):
            return found
        for engine in self.engines.values():
            cost = engine.load.step_cost
            best = found.get(engine.fingerprint)
            if cost is not None and (best is None or cost.max_rows > best.max_rows):
                found[engine.fingerprint] = cost
        return found

    def lacks_constraints(self) -> Role | None:
        """A role whose linked engines all reject constraints; None where no engine is linked."""
        for role in Role:
            members = [e.member for e in self.engines.values() if e.member.role is role]
            if members and not any(member.can_constrain for member in members):
                return role
        return None

    @property
    def has_idle_engine(self) -> bool:
        """Whether some engine would compute a new prompt at once."""
        return any(
            engine.takes_prompts and engine.is_ready and engine.account.has_no_prompt
            for engine in self.engines.values()
        )

    def limits(self, base: ModelLimits) -> ModelLimits:
        """`base`, narrowed to what the linked engines can serve."""
        engines = list(self.engines.values())
        prefill = [e for e in engines if e.takes_prompts]
        decode = [e for e in engines if e.member.role is Role.DECODE]
        lens = (e.member.max_model_len for e in engines)
        return replace(
            base,
            max_model_len=min(lens, default=base.max_model_len),
            max_prompt_tokens=max((e.pool_tokens for e in prefill), default=None),
            max_total_tokens=max((e.pool_tokens for e in decode), default=None),
        )
