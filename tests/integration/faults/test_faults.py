"""The fault matrix: break a real cluster in every phase of a request, and check the outcome.

One fault per row. After any fault, its streams equal the single process's tokens or end with the
error that the row names, every ledger is idle and balanced, and no process, socket or descriptor is
left (`faults.Scene.check`). The faults are in breakages, memory_faults, link_faults and
network_faults; half of the nodes run under `python -O`. Parts of some rows need no process, and are
tested with their code:

    F11, F12 silence between two nodes   test_channel_silence, test_tcp_faults
    F16 a reset at any byte              test_tcp_faults
    F25 blocks rewritten under a pull    test_handoff_search, test_shm_transport
    F26 messages forged by peers         test_handoff_source, test_handoff_puller, test_handoff_wire
    F27 every order of a few messages    test_handoff_search, test_gateway_session_faults
    F42 each differing field is named    test_handoff_states
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from fault_scenes import breakages as do
from fault_scenes import faults, link_faults, mixed_run, network_faults
from fault_scenes import memory_faults as memory
from fault_scenes.fault_cluster import Cluster, cluster, write_model
from fault_scenes.faults import BLOCK_SIZE, Reference, Scene
from patience import AT_ONCE_S, SOON_S

from baton.core.engine_config import EngineConfig
from baton.core.request.sampling_params import SamplingParams

NUM_MIXED = 40


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def system(reference: Reference) -> Iterator[Cluster]:
    """Two nodes per role, and a second gateway that does not wait for recoveries."""
    names = ("gateway-0", "gateway-1", *do.PREFILLS, *do.DECODES)
    flags = {
        "gateway_0": ("--recovery-wait-s", "30"),  # restarts share the CPU with all else
        "gateway_1": ("--recovery-wait-s", "0.3"),
        "node": ("--num-kv-blocks", "100"),
    }
    with cluster(reference.model_dir, *names, **flags) as running:
        yield running


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A fault, and its effect on the affected stream.

    `attempts`: allowed numbers of dispatches. `found_within_s`: from the fault to the last
    dispatch.
    """

    id: str
    fault: Callable[[Scene], Awaitable[None]]
    attempts: tuple[int, ...] = ()
    found_within_s: float = AT_ONCE_S


AGAIN, ONCE = (2,), (1,)

ROWS = (
    Row("F1-node", partial(do.kill_prefill_before_its_first_chunk, "node"), AGAIN),
    Row("F2-engine-chunk-4", partial(do.kill_prefill_at_chunk, 4, "engine"), AGAIN),
    Row("F3-F8", do.kill_prefill_after_the_pull, ONCE),
    Row("F5-node-edge", partial(do.kill_decode_at_token, BLOCK_SIZE, "node"), AGAIN),
    Row("F37", do.kill_engines_under_one_request),
    Row("gateway-killed", do.kill_gateway),
    Row("F9-prefill-0.2s", partial(do.pause_prefill, 0.2, "node"), ONCE),
    Row("F9-gateway-0.2s", partial(do.pause_gateway, 0.2), ONCE),
    Row("F9-decode-engine", do.hang_decode_engine, AGAIN, SOON_S),
    Row("F26", do.send_crafted_tickets),
    Row("F29", memory.stop_the_pulls),
    Row("F30-before-prefill", do.leave_before_the_prefill),
    Row("F30-in-prefill", do.leave_in_the_prefill),
    Row("F30-before-pull", do.leave_before_the_pull),
    Row("F30-in-decode", do.leave_in_the_decode),
)
SLOW_ROWS = (
    Row("F28-decode", memory.outgrow_the_pool, ONCE),
    Row("F6", do.kill_both_decodes, (2, 3), 30.0),  # 3: the other engine's end was not known yet
    Row("F25", memory.ask_by_a_stale_index, ONCE),
    Row("F42", do.join_with_other_makes),
    Row("F11-F12-F16", network_faults.break_a_pair_in_every_way),
    Row("F27", link_faults.shuffle_messages),
    Row("F28-admission", memory.ask_for_more_than_fits, ONCE),
    Row("F5-constrained", do.kill_decode_of_a_constrained, AGAIN),
    # A killed source's pool stays mapped: a pull of blocks that were all announced may still
    # succeed.
    Row("F2-node-before-pull", partial(do.kill_prefill_before_the_pull, "node"), (1, 2)),
    Row("F4-node", partial(do.kill_decode_during_the_prefill, "node"), AGAIN),
    Row("F9-decode-0.2s", partial(do.pause_decode, 0.2, "node"), ONCE),
    Row("F9-prefill", partial(do.pause_prefill, 1.5, "node"), AGAIN, SOON_S),
    Row("F34", do.take_ports),
    Row("F1-engine", partial(do.kill_prefill_before_its_first_chunk, "engine"), AGAIN),
    Row("F5-engine-token-0", partial(do.kill_decode_before_its_first_token, "engine"), AGAIN),
    Row("F5-node-token-1", partial(do.kill_decode_at_token, 1, "node"), AGAIN),
    Row("F5-node-last", partial(do.kill_decode_at_token, 22, "node", num_left=2), (1, 2)),
    Row("F9-decode", partial(do.pause_decode, 1.8, "node"), AGAIN, SOON_S),
    Row("F9-gateway-3s", partial(do.pause_gateway, 3.0), (1, 2), 5.0),
    # Longer than a directory entry's TTL; then so long that the supervisor ends the engine.
    Row("F9-decode-8s", partial(do.pause_decode, 8.0, "node"), AGAIN, SOON_S),
    Row("F9-prefill-engine-33s", partial(do.pause_prefill, 33.0, "engine"), AGAIN, SOON_S),
)


@pytest.mark.parametrize(
    "row",
    [*ROWS, *(pytest.param(row, marks=pytest.mark.slow) for row in SLOW_ROWS)],
    ids=lambda row: row.id,
)
async def test_fault(system: Cluster, reference: Reference, row: Row) -> None:
    async with Scene(system, reference) as scene:
        await row.fault(scene)
        await scene.check()
        if not row.attempts:
            return
        result = scene.worst.result
        print(
            f"{row.id}: {result.attempts} attempts, TTFT {result.times.ttft_s:.3f} s, "
            f"longest gap {max(result.times.gaps_s):.3f} s"
        )
        assert result.attempts in row.attempts
        if result.attempts > 1:
            print(f"{row.id}: found in {scene.found_s(scene.worst):.3f} s")
            assert scene.found_s(scene.worst) < row.found_within_s


async def test_a_mix_of_requests_while_nodes_are_killed(
    system: Cluster, reference: Reference
) -> None:
    """The GPU tests' mixed run, with cancels and at a smaller size, is right on a CPU."""
    requested = mixed_run.draw(NUM_MIXED, seed=1, max_prompt_tokens=120)
    kills = {12: "decode-0", 26: "prefill-0"}
    config = EngineConfig(model=str(reference.model_dir), load_format="dummy", device="cpu")
    async with Scene(system, reference) as scene:
        outcome = await mixed_run.run(system, scene, requested, kills)
        await scene.heal()
        await scene.wait_idle()
        await mixed_run.assert_fsck_is_clean(system)
        mixed_run.Reference(config).compare(scene.streams, outcome)
    print(mixed_run.describe(outcome))
    assert outcome.ended["finished"] > 0.8 * NUM_MIXED
    assert outcome.ended["cancelled"] > 0
    assert outcome.ended["finished"] + outcome.ended["cancelled"] == NUM_MIXED
    assert not outcome.near_ties  # the same kind of CPU gives the same results


def test_the_reference_tells_a_near_tie_from_a_wrong_token(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sampling in ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}):
        params = SamplingParams(
            **{"max_tokens": 9, "temperature": 0.0, "ignore_eos": True} | sampling
        )
        stream = faults.Stream(tuple(range(40, 90)), params, generation=None)
        expected = stream.tokens = reference.tokens([stream])[0]
        assert reference.num_near_ties(stream, expected) == 0
        assert reference.margin(stream, 4) == 0.0
        candidates = (token for token in range(320) if token != expected[4])
        for token in candidates:  # the first one that top_p keeps
            stream.tokens = [*expected[:4], token]
            if reference.margin(stream, 4) < 100:
                break
        stream.tokens += reference.rest(stream, 5)
        with pytest.raises(AssertionError, match="token 4 is behind by"):
            reference.num_near_ties(stream, expected)
        with monkeypatch.context() as patch:
            patch.setattr(faults, "NEAR_TIE", 100.0)
            assert reference.num_near_ties(stream, expected) == 1
        stream.tokens[-1] ^= 1
        with pytest.raises(AssertionError), monkeypatch.context() as patch:
            patch.setattr(faults, "NEAR_TIE", 1e-3)
            reference.num_near_ties(stream, [*stream.tokens[:-1], stream.tokens[-1] ^ 1])
