"""Do the tests detect bugs? Bugs are planted one by one, with the check that catches each.

A bug is an edit of the production code: in `where`, the text on the left of each pair is replaced
by the one on the right. Its check passes without the bug and fails with it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import pytest
from fakes.handoff import handoff_checks as checks
from fakes.handoff.handoff_checks import search
from fakes.handoff.memory_transport import MemoryPull

from baton.core.request import token_ids
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.scheduling import sequence
from baton.engine.scheduling.block_tables import BlockTables
from baton.engine.scheduling.queues import Queues
from baton.kv_transfer.protocol.handoff_side import HandoffSide, Tombstones
from baton.kv_transfer.protocol.puller import Puller
from baton.kv_transfer.protocol.puller_transfer import PullerTransfer
from baton.kv_transfer.protocol.source import Source
from baton.kv_transfer.shm.shm_window import ShmWindow
from baton.node.peers.pulls import Pulls

Check = Callable[[], None]
Edit = tuple[str, str]


@dataclass(frozen=True)
class Bug:
    """`breaks`: the effect on the system, `shows`: what the check reports."""

    name: str
    breaks: str
    where: Callable[..., Any]
    edits: list[Edit]
    check: Check
    shows: str
    also: dict[Callable[..., Any], list[Edit]] = field(default_factory=dict)
    owner: object | None = None  # the owner of the edited function, if not its class


rewritten_under_a_copy = partial(search, "cancel", "rewrite")
OTHER_HASHES = 'if manifest.blocks.hashes != b"".join(self.intent.block_hashes[first:end]):'

BUGS = [
    # ---- the copy
    Bug(
        "no generation check behind the copy",
        "a block that was rewritten during its copy is attached",
        MemoryPull._copy,
        [("if stop == source.block_bytes and self._is_stale(pair):", "if False:")],
        rewritten_under_a_copy,
        shows="block 1 holds 11ee",
    ),
    Bug(
        "no generation check at all",
        "a block that was rewritten before its copy is attached",
        MemoryPull._is_stale,
        [("return generation != pair.source.generation", "return False")],
        rewritten_under_a_copy,
        shows="block 1 holds 11ee",
    ),
    Bug(
        "shm: no generation check behind the copy",
        "a consistent copy of somebody else's KV is attached",
        ShmWindow.copy_blocks,
        [("# x86 keeps loads in order", "return PullOutcome.OK  #")],
        checks.shm_rejects_what_is_rewritten_under_it,
        shows="somebody else's bytes were taken",
    ),
    Bug(
        "the generation does not move at reallocation",
        "a puller cannot tell the new content from the old",
        BlockPool.allocate,
        [("self._generations.bump(ids)", "pass")],
        rewritten_under_a_copy,
        shows="block 1 holds 11ee",
    ),
    Bug(
        "the generation of the first block only moves",
        "a puller cannot tell the new content of the others from the old",
        BlockPool.allocate,
        [("self._generations.bump(ids)", "self._generations.bump(ids[:1])")],
        rewritten_under_a_copy,
        shows="block 1 holds 11ee",
    ),
    Bug(
        "a stale copy counts as good",
        "the transport's verdict does not reach the request",
        Puller._on_pull_ended,
        [("elif outcome is PullOutcome.OK:", "elif True:")],
        rewritten_under_a_copy,
        shows="block 0 holds 0000",
    ),
    Bug(
        "a request starts before its last copy has ended",
        "attention reads blocks that are not there yet",
        Puller._complete_if_done,
        [("or transfer.in_flight ", "")],
        search,
        shows="block 1 holds 0000",
    ),
    Bug(
        "a chunk that was only launched is announced to those who cannot see its end",
        "blocks are copied before they are written",
        Source._flush,
        [("if not is_computed and not transfer.sees_steps:", "if False:")],
        partial(search, "lost dispatch", launches=True, sees_steps=False),
        shows="failed although nothing happened to it",
    ),
    Bug(
        "a chunk is copied when it was launched",
        "blocks are copied before they are written",
        Pulls._is_written,
        [("return ", "return True or ")],
        checks.what_a_step_writes_is_not_copied_before,
        shows="is not the KV of this sequence",
    ),
    Bug(
        "a pull that waits for its step cannot be cancelled",
        "its reservation is kept as long as nobody computes the step",
        Pulls.cancel,
        [("self._end_prepared(", "(lambda *_: None)(")],
        checks.what_waits_for_a_step_can_be_cancelled,
        shows="the reservation is kept",
    ),
    # ---- fences
    Bug(
        "the reservation is dropped with a copy in flight",
        "the copy writes into the next owner's blocks",
        Puller._bury_if_still,
        [("if transfer.in_flight:", "if False:")],
        partial(search, "cancel"),
        shows="dropped under a copy",
    ),
    Bug(
        "an abort forgets the step in flight",
        "the step writes into the next owner's blocks",
        BlockTables.free,
        [("if step.places.pop(sequence, None) is not None:", "if False:")],
        checks.an_aborted_step_keeps_its_blocks,
        shows="blocks are free while a step writes to them",
    ),
    # ---- who may send what
    Bug(
        "a source takes dispatches for its predecessor",
        "it computes, and holds for a lease, what nobody can pull",
        Source._refusal,
        [("if offer.ticket.source_incarnation != self._hello.incarnation:", "if False:")],
        partial(search, "crash"),
        shows="computes what nobody can pull",
    ),
    Bug(
        "a puller takes dispatches for its predecessor",
        "it waits for what the source keeps for another",
        Puller._refusal,
        [("if intent.ticket.puller_incarnation != self._hello.incarnation:", "if False:")],
        partial(search, "crash"),
        shows="waits for another's KV",
    ),
    Bug(
        "a source listens to whoever names a transfer",
        "blocks are freed under their puller's copy",
        Source._owned,
        [("and transfer.puller == puller ", "")],
        partial(search, "stranger"),
        shows="a stranger ended a transfer",
    ),
    Bug(
        "a ticket is good for two requests",
        "the first one's blocks are never released",
        Source._refusal,
        [("if transfer is not None and transfer.offer is not None:", "if False:")],
        checks.a_ticket_is_good_for_one_request,
        shows="the first one's blocks are lost",
    ),
    # ---- delayed, lost, duplicated
    Bug(
        "no tombstones",
        "a dispatch that arrives after its cancel is computed all the same",
        Tombstones.get,
        [("return None if entry is None else entry[1]", "return None")],
        partial(search, "cancel"),
        shows="a late dispatch revived a transfer",
    ),
    Bug(
        "a gap in the manifests is ignored",
        "a request starts with the blocks behind the lost chunk in its place",
        PullerTransfer.accept,
        [
            ("if self.handoff is not None:", "if False:"),
            ("if manifest.seq > self.next_seq:", "if False:"),
            (OTHER_HASHES, "if False:"),
            ("if end > expected or (is_last and end < expected):", "if False:"),
            ("self.next_seq += 1", "self.next_seq = manifest.seq + 1"),
        ],
        partial(search, "swap"),
        shows="block 0 holds 1111",
    ),
    Bug(
        "a doubled manifest is pulled twice",
        "the second copy overlaps the request's own writes",
        PullerTransfer.accept,
        [("return False", "self.unpulled.append((0, manifest))\n        return True")],
        partial(search, "double"),
        shows="pulled twice",
    ),
    Bug(
        "the hashes of a manifest are not compared",
        "a source that mixed up two prompts passes one off as the other",
        PullerTransfer.accept,
        [(OTHER_HASHES, "if False:")],
        checks.another_prompt_s_blocks_are_refused,
        shows="pulled",
    ),
    Bug(
        "a transfer that ended is not forgotten",
        "its blocks are released twice: once under their next owner",
        Source._end,
        [("del self.transfers[transfer_id]", "pass")],
        search,
        shows="released twice",
    ),
    # ---- time
    Bug(
        "leases run on wall time",
        "when somebody sets the clock back, blocks are kept for as long",
        HandoffSide.handle,
        [("self._clock.monotonic_s()", "self._clock.unix_ns() / 1e9")],
        checks.lease_ends_whatever_wall_time_does,
        also={Source._renew: [("self._clock.monotonic_s()", "self._clock.unix_ns() / 1e9")]},
        shows="the lease goes on",
    ),
    Bug(
        "leases are not renewed",
        "a puller that waits for memory loses what it waits for",
        Puller._on_tick,
        [
            # The edited function is compiled outside its class.
            ("super()._on_tick(now_s)", "HandoffSide._on_tick(self, now_s)"),
            ("t.renewal_s <= now_s", "False"),
        ],
        checks.a_waiting_puller_renews,
        shows="the source would take its blocks back",
    ),
    Bug(
        "a renewal revives an expired lease",
        "blocks that were given back count as held, and are given back again",
        Source._end,
        [
            (
                "del self.transfers[transfer_id]",
                "if not isinstance(error, LeaseExpired):\n        del self.transfers[transfer_id]",
            )
        ],
        partial(search, "lost dispatch", advances=1),
        shows="released twice",
    ),
    Bug(
        "renewals reach past the deadline",
        "a puller that forgot its request keeps its blocks for ever",
        Source._renew,
        [("min(until_s, transfer.offer.deadline_s)", "until_s")],
        checks.lease_ends_at_the_deadline,
        shows="blocks are kept past the request's deadline",
    ),
    Bug(
        "a puller waits without a deadline",
        "the request hangs",
        HandoffSide._on_tick,
        [("t.expires_s <= now_s", "False")],
        partial(search, "crash"),
        shows="{'waiting'}",
    ),
    # ---- memory
    Bug(
        "a small one overtakes in the queue for memory",
        "a large prompt starves behind small ones",
        Queues.refuse_head,
        [("queue.pin_head()", "pass"), ("self.opportunities", "None")],
        checks.nobody_overtakes,
        shows="a later one has room before the first",
    ),
    Bug(
        "the prefix cache skips what it lacks",
        "a block is used without those before it",
        PrefixCache.match,
        [
            (
                "found_prefix(hashes, self._block_of.get)",
                "[*filter(None, map(self._block_of.get, hashes))]",
            )
        ],
        checks.a_chain_with_a_hole_ends_at_it,
        shows="a block is used without those before it",
    ),
    Bug(
        "a wholly cached prompt has nothing to compute",
        "there are no logits to sample its first token from",
        BlockTables.find,
        [("sequence.num_tokens - 1, None", "sequence.num_tokens, None")],
        checks.prompts_that_share_blocks_get_their_own_tokens,
        shows="num_launched_tokens=8",
    ),
    Bug(
        "a block's hash forgets what came before it",
        "equal words behind different beginnings share their KV",
        token_ids.block_hashes,
        [("parent + block", "block")],
        checks.prompts_that_share_blocks_get_their_own_tokens,
        owner=sequence,
        shows="position 0 is not the KV of this sequence",
    ),
]


def edited(function: Callable[..., Any], edits: list[Edit]) -> FunctionType:
    """The function with each edit made; an edit that does not match its source is an error."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} is not, or not once, in {function.__qualname__}"
        source = source.replace(old, new)
    module: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + source, function.__qualname__, "exec")
    exec(code, function.__globals__, module)
    made: FunctionType = module[function.__name__]
    return made


def plant(bug: Bug, patch: pytest.MonkeyPatch) -> None:
    for function, edits in {bug.where: bug.edits, **bug.also}.items():
        owner = bug.owner or function.__globals__[function.__qualname__.split(".")[0]]
        patch.setattr(owner, function.__name__, edited(function, edits))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)
    with pytest.raises((AssertionError, LookupError), match=re.escape(bug.shows)):
        bug.check()


def name_of(check: Check) -> str:
    if isinstance(check, partial):
        extra = [f"{name}={value}" for name, value in check.keywords.items()]
        return ", ".join([*check.args, *extra])
    return check.__name__


CHECKS = {name_of(bug.check): bug.check for bug in BUGS}


@pytest.mark.parametrize("name", CHECKS)
def test_its_check_passes_without_it(name: str) -> None:
    CHECKS[name]()
