"""core/: formulas against independent ones, flags against argparse, errors over the wire."""

from __future__ import annotations

import argparse
import hashlib
import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.launch import gateway_parser, node_parser
from baton.cli.main import build_parser
from baton.core import errors, flags
from baton.core.config import ClusterConfig, GatewayConfig, NodeConfig
from baton.core.engine_config import EngineConfig
from baton.core.membership import Role
from baton.core.metrics import Slo, TokenTimes, percentile
from baton.core.request.constraint import Constraint, ConstraintKind
from baton.core.request.request import Request, Ticket, mix64, token_key
from baton.core.request.sampling_params import OPTIONS, SAMPLING, SamplingParams
from baton.core.request.token_ids import block_hashes, column, pack, root_hash, tenant_tag
from baton.proto import codec
from baton.proto.v1 import common_pb2, inference_pb2


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70))
def test_token_ids_come_back_from_their_packed_form(ids: list[int]) -> None:
    assert pack(ids) == b"".join(token_id.to_bytes(4, "little") for token_id in ids)
    unpack = codec.token_ids_from_wire
    assert unpack(pack(ids)) == unpack(pack(column(ids))) == column(ids)
    assert column(ids).tolist() == ids


def test_a_column_takes_numbers_and_nothing_else() -> None:
    assert column(b"ab").tolist() == [97, 98], "not two bytes of one id"
    for bad in ([-1], [2**32], [1.5], ["a"], "a", [None]):
        with pytest.raises((TypeError, OverflowError)):
            column(bad)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidRequest, match="cut off"):
        codec.token_ids_from_wire(b"12345")


def test_block_hash_is_the_documented_formula() -> None:
    root = root_hash("f" * 8, "tenant")
    tag = hashlib.blake2b(b"tenant", digest_size=4).digest()
    assert root == tag + hashlib.blake2b(b"8:ffffffff" + b"tenant", digest_size=12).digest()
    tokens = list(range(20))
    packed = b"".join(t.to_bytes(4, "little") for t in tokens[:16])
    assert block_hashes(root, tokens, 16) == [
        tag + hashlib.blake2b(root + packed, digest_size=12).digest()
    ]
    assert root_hash("f")[:4] == bytes(4), "nobody's"
    assert tenant_tag("12345678 and more") == tenant_tag("12345678")


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70), st.sampled_from([1, 4, 16]))
def test_block_hashes_cover_full_blocks_and_share_prefixes(tokens: list[int], size: int) -> None:
    root = root_hash("m")
    hashes = block_hashes(root, tokens, size)
    assert len(hashes) == len(tokens) // size
    assert block_hashes(root, tokens[: len(hashes) * size], size) == hashes
    assert len(set(hashes)) == len(hashes)


def test_salts_and_fingerprints_do_not_collide_by_concatenation() -> None:
    assert root_hash("a", "bc") != root_hash("ab", "c")


def test_mix64_matches_the_published_sequence() -> None:
    """The first outputs of the reference implementation of splitmix64, seeded with 1234567."""
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        outputs.append(mix64(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_token_keys_differ_in_every_argument() -> None:
    keys = {token_key(s, i, p) for s in range(8) for i in range(4) for p in range(64)}
    assert len(keys) == 8 * 4 * 64


def test_token_times() -> None:
    times = TokenTimes(10.0, (10.5, 10.75, 10.85))
    assert times.ttft_s == 0.5
    assert times.handoff_gap_s == 0.25
    assert times.gaps_s == pytest.approx((0.25, 0.1))
    assert times.tpot_s == pytest.approx(0.175)
    assert Slo(1, 0.3).is_met_by(times) and not Slo(1, 0.2).is_met_by(times)
    assert not Slo(1, 0.3).is_met_by(TokenTimes(0, ()))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_percentile_is_nearest_rank(samples: list[float], q: float) -> None:
    value = percentile(samples, q)
    assert value in samples
    assert sum(s <= value for s in samples) >= q / 100 * len(samples) - 1e-9


@pytest.mark.parametrize(("q", "rank"), [(99.9, 999), (99.0, 990), (50.0, 500), (100.0, 1000)])
def test_percentiles_of_a_thousand(q: float, rank: int) -> None:
    assert percentile([*range(1, 1001)], q) == rank


def test_flags_round_trip() -> None:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, EngineConfig, NodeConfig)
    config = EngineConfig(model="m", tensor_parallel_size=2, enable_prefix_caching=False)
    parsed = parser.parse_args(flags.to_argv(config))
    assert flags.parse(EngineConfig, parsed) == config
    assert flags.parse(EngineConfig, parser.parse_args(["--tp", "4"])).tensor_parallel_size == 4


def test_secrets_go_by_the_environment_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ClusterConfig(redis_url="redis://:password@h:1/0", cluster_secret="s", cluster="c")
    argv = flags.to_argv(config, leave_out=flags.SECRET_FIELDS)
    assert argv == ["--cluster", "c"]
    for name, value in flags.to_environment([config]).items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, ClusterConfig)
    assert flags.parse(ClusterConfig, parser.parse_args(argv)) == config
    assert flags.to_environment([EngineConfig()]) == {}


def test_a_child_s_flags_are_not_changed_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child's command line omits defaults, so the environment must not override them."""
    monkeypatch.setenv("BATON_CLUSTER", "other")
    monkeypatch.setenv("BATON_MODEL", "other")
    environment = flags.environment_without([ClusterConfig(), NodeConfig()])
    assert "BATON_CLUSTER" not in environment and environment["BATON_MODEL"] == "other"
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("url", "is_refused"),
    [
        ("redis://:pa55@h:1/0", True),
        ("rediss://baton:pa55@h:1/0", True),
        ("unix://:pa55@/run/redis.sock", True),
        ("redis://h:1/0?password=pa55", True),
        ("redis://[h:1@:pa55", True),
        ("redis://baton@h:1/0", False),
        ("unix:///run/redis.sock?db=1", False),
        ("redis+spawn://", False),
    ],
)
def test_a_password_is_for_no_command_line(
    url: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def commands() -> list[tuple[argparse.ArgumentParser, list[str]]]:
        baton = [[name] for name in ("up", "fsck", "doctor")]
        launch = (gateway_parser(), node_parser(Role.PREFILL), node_parser(Role.DECODE))
        return [(build_parser(), argv) for argv in baton] + [(each, []) for each in launch]

    for parser, argv in commands():
        flag = [*argv, "--redis-url", url]
        if is_refused:
            with pytest.raises(SystemExit):
                parser.parse_args(flag)
            printed = capsys.readouterr().err
            assert "give it as BATON_REDIS_URL" in printed
            assert "pa55" not in printed
        else:
            assert parser.parse_args(flag).redis_url == url
    monkeypatch.setenv("BATON_REDIS_URL", url)
    for parser, argv in commands():
        assert parser.parse_args(argv).redis_url == url


def test_groups_of_flags_have_a_title() -> None:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, EngineConfig, NodeConfig)
    text = parser.format_help()
    assert "\nOne engine: model, memory, batch:\n" in text
    assert "\nOne node: where it listens, its GPUs, its hand-off limits:\n" in text


def test_environment_gives_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_BLOCK_SIZE", "32")
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, EngineConfig)
    assert flags.parse(EngineConfig, parser.parse_args([])).block_size == 32


@pytest.mark.parametrize(
    ("text", "value"), [("on", True), ("Off", False), ("1", True), ("", False)]
)
def test_the_environment_says_yes_or_no(
    text: str, value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_ENABLE_PREFIX_CACHING", text)
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, EngineConfig)
    for argv, expected in (([], value), (["--enable-prefix-caching"], True)):
        config = flags.parse(EngineConfig, parser.parse_args(argv))
        assert config.enable_prefix_caching is expected


@pytest.mark.parametrize(
    ("name", "value"), [("enable-lora", "maybe"), ("dtype", "float8"), ("block-size", "x")]
)
def test_what_the_environment_gives_is_checked_as_a_flag_is(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"BATON_{name.replace('-', '_').upper()}", value)
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, EngineConfig)
    with pytest.raises(SystemExit):
        parser.parse_args([])
    printed = capsys.readouterr().err
    assert f"--{name}" in printed and repr(value) in printed


@pytest.mark.parametrize("wrong", [{"block_size": 12}, {"max_num_seqs": 0}])
def test_bad_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(errors.StartupFailed):
        flags.from_caller(EngineConfig, wrong)


NO_TIMES = [0.0, -1.0, float("nan"), float("inf"), 1e10]
WRONG_OF_RANKS = [
    *((name, value) for name in ("rank_timeout_s", "rank_start_timeout_s") for value in NO_TIMES),
    *(("num_threads", value) for value in (0, -1)),
]


@pytest.mark.parametrize(("name", "value"), WRONG_OF_RANKS)
def test_what_no_rank_can_run_with_is_refused_by_its_flag(name: str, value: float) -> None:
    with pytest.raises(errors.StartupFailed, match=f"--{name.replace('_', '-')} must be"):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_request_s", "heartbeat_timeout_s"])
def test_no_time_at_all_is_not_endless(name: str) -> None:
    """Timeouts must be positive: with 0 every request would fail, or every node be lost."""
    for value in (0.0, -1.0):
        with pytest.raises(errors.StartupFailed, match=f"--{name.replace('_', '-')} must be"):
            GatewayConfig(**{name: value})  # type: ignore[arg-type]


def test_a_disk_without_a_name_is_refused() -> None:
    with pytest.raises(errors.StartupFailed, match="--kv-disk-path must name a directory"):
        EngineConfig(kv_disk_path="", swap_space=1.0)


def test_every_error_survives_the_wire() -> None:
    for code, cls in errors._tree(errors.BatonError).items():
        rebuilt = errors.from_code(code, "why", None)
        assert type(rebuilt) is cls
        assert rebuilt.message == "why"
    assert type(errors.from_code("from the future", "why")) is errors.BatonError


def test_every_parameter_is_a_field_of_the_wire_and_the_other_way_round() -> None:
    beside = {"model", "text", "token_ids", "sampling", "request_id"}
    constraints = {kind.value for kind in ConstraintKind}
    wire = set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert wire == set(SAMPLING) | constraints
    assert set(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) == set(OPTIONS) | beside


def test_a_dispatch_carries_the_whole_request() -> None:
    values: dict[str, Any] = {
        "number": 0.5, "integer": 9, "boolean": True, "anyOf": ("a", "b"), "array": (5, 6),
        "object": ((2, -1.5), (7, 3.0)),
    }  # fmt: skip
    given = {n: values[one.field.schema.get("type", "anyOf")] for n, one in SAMPLING.items()}
    given |= {"logprobs": 0, "seed": 2**63 - 1, "early_stopping": "never", "speculative": False}
    sampling = SamplingParams(**given, constraint=Constraint(ConstraintKind.REGEX, "a+"))
    plain = SamplingParams()
    assert not [n for n in SamplingParams.__slots__ if getattr(sampling, n) == getattr(plain, n)]
    for params in (sampling, plain):
        prompt, output = column((1, 2)), column((3, 4))
        request = Request("a" * 32, 3, prompt, params, output, "salt", 2, ("b" * 32, "c" * 32))
        request = replace(request, caller_id=2**64 - 1)
        wire = codec.dispatch_to_wire(request, Ticket("t", "s", "p"), 1.0)
        assert codec.request_from_wire(wire) == request
    for kind in ConstraintKind:
        constraint = Constraint(kind, '["a", "b"]')
        params = replace(plain, constraint=constraint)
        assert codec.sampling_from_wire(codec.sampling_to_wire(params)).constraint == constraint
    forks = [(fork.key, fork.sample_index, fork.caller_id, fork.forks) for fork in request.forks]
    assert forks == [("b" * 32 + "/3", 3, 2**64 - 1, ()), ("c" * 32 + "/3", 4, 2**64 - 1, ())]
    request = replace(request, sampling=replace(plain, prompt_logprobs=3))
    assert not any(fork.sampling.prompt_logprobs for fork in request.forks), "the first one's"
