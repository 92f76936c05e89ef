"""The GPUs that `baton up` chooses by default, and the driver's information about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from baton.cli.deployment import up
from baton.cli.deployment.deployment import Deployment
from baton.cli.host import doctor, gpu_choice, host_gpus
from baton.cli.host.gpu_choice import GpuChoice, choose_gpus
from baton.cli.host.host_gpus import HostGpu, HostGpus
from baton.core.config import ClusterConfig, GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import TBT_TARGET_MS, EngineConfig
from baton.core.errors import StartupFailed

GIB = 1 << 30
SMI = """\
GPU-aaaa-1, 143771, NVIDIA H200
GPU-bbbb-2, 24564, NVIDIA GeForce RTX 4090, of somebody
GPU-cccc-3, [N/A], NVIDIA GH200
"""


def host(count: int, gib: int | None = 80) -> HostGpus:
    total_bytes = None if gib is None else gib * GIB
    gpus = tuple(HostGpu("NVIDIA H100", total_bytes) for _ in range(count))
    return HostGpus(gpus, "" if gpus else "this host has no GPU")


def chosen(
    on: HostGpus,
    up: UpConfig | None = None,
    *,
    tp: int = 1,
    pp: int = 1,
    device: str = "auto",
    share: float = 0.9,
    gpus: str | None = None,
    weights_gib: float = 16,
) -> GpuChoice:
    engine = EngineConfig(
        device=device,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        gpu_memory_utilization=share,
    )
    node = NodeConfig(gpus=gpus)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_choice, "weights_bytes", lambda _: int(weights_gib * GIB))
        return choose_gpus(up or UpConfig(mode="disaggregated"), engine, node, on)


def refused(*args: object, **options: object) -> StartupFailed:
    with pytest.raises(StartupFailed) as caught:
        chosen(*args, **options)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize(
    ("count", "tp", "prefill", "decode", "why"),
    [
        (1, 1, "0", "0", "too few GPUs"),
        (2, 1, "0", "1", "one per engine"),
        (3, 1, "0,1", "2", "odd engine for prefill"),
        (4, 1, "0,1", "2,3", "one per engine"),
        (2, 2, "0,1", "0,1", "too few GPUs"),
        (4, 2, "0,1", "2,3", "2 per engine"),
        (5, 2, "0,1", "2,3", "GPU 4 is left over"),
        (6, 2, "0,1,2,3", "4,5", "odd engine for prefill"),
    ],
)
def test_gpus_are_split_and_it_says_why(
    count: int, tp: int, prefill: str, decode: str, why: str
) -> None:
    choice = chosen(host(count), tp=tp)
    assert (choice.up.prefill_gpus, choice.up.decode_gpus) == (prefill, decode)
    assert choice.line.startswith(f"prefill on GPU {prefill}, decode on GPU {decode} (NVIDIA H100")
    assert why in choice.line and "\n" not in choice.line


def test_an_engine_has_as_many_gpus_as_its_stages_have_together() -> None:
    choice = chosen(host(9), tp=2, pp=2, weights_gib=200)
    assert (choice.up.prefill_gpus, choice.up.decode_gpus) == ("0,1,2,3", "4,5,6,7")
    error = refused(host(6), UpConfig(mode="disaggregated", prefill_gpus="0,1,2"), pp=2)
    sizes = "--tensor-parallel-size 1 x --pipeline-parallel-size 2"
    assert f"{sizes} does not divide 3 GPUs" in error.message
    assert sizes in refused(host(1), pp=2).message


@pytest.mark.parametrize(
    ("mode", "count", "tp", "gpus", "why"),
    [
        ("aggregated", 1, 1, "0", "--mode aggregated"),
        ("aggregated", 3, 1, "0,1,2", "--mode aggregated"),
        ("aggregated", 5, 2, "0,1,2,3", "--mode aggregated"),
        ("auto", 1, 1, "0", "too few GPUs"),
        ("auto", 3, 2, "0,1", "too few GPUs"),
    ],
)
def test_engines_that_do_both_have_their_gpus_for_themselves(
    mode: str, count: int, tp: int, gpus: str, why: str
) -> None:
    choice = chosen(host(count), UpConfig(mode=mode), tp=tp)
    assert (choice.up.mode, choice.up.prefill_gpus) == ("aggregated", None)
    assert choice.up.decode_gpus == gpus and choice.engine.gpu_memory_utilization == 0.9
    assert choice.line.startswith(f"prefill and decode on GPU {gpus} (NVIDIA H100")
    assert why in choice.line


def test_auto_has_both_roles_where_there_are_gpus_for_them() -> None:
    choice = chosen(host(2), UpConfig(mode="auto"))
    assert (choice.up.mode, choice.up.prefill_gpus, choice.up.decode_gpus) == ("auto", "0", "1")


def test_with_engines_that_do_both_gpus_have_no_role() -> None:
    error = refused(host(2), UpConfig(mode="aggregated", decode_gpus="1"))
    assert "every engine does both" in error.message and error.hint == "--gpus 1"


def test_a_promise_is_for_engines_that_take_whole_requests() -> None:
    def deployed(mode: str, tbt_target_ms: float | None) -> Deployment:
        engine = EngineConfig(tbt_target_ms=tbt_target_ms)
        configs = (NodeConfig(), GatewayConfig())
        return Deployment(UpConfig(mode=mode), engine, *configs, lambda *_: None)

    assert deployed("disaggregated", None).engine.tbt_target_ms is None
    assert deployed("auto", None).engine.tbt_target_ms == TBT_TARGET_MS
    assert deployed("aggregated", 9.0).engine.tbt_target_ms == 9.0
    with pytest.raises(StartupFailed, match="--mode auto or aggregated"):
        deployed("disaggregated", 9.0)
    nodes = [name for name, _ in deployed("aggregated", None)._nodes()]
    assert nodes == ["decode-0"]


def test_two_engines_of_one_gpu_take_half_each() -> None:
    choice = chosen(host(1))
    assert choice.engine.gpu_memory_utilization == 0.45
    assert "each engine takes 0.45 of its memory" in choice.line
    assert chosen(host(1), share=0.4).engine.gpu_memory_utilization == 0.4
    assert chosen(host(2)).engine.gpu_memory_utilization == 0.9
    error = refused(host(1), share=0.6)
    assert "each takes 0.6" in error.message and "0.45" in error.hint


def test_weights_that_do_not_fit_are_refused_with_the_numbers() -> None:
    error = refused(host(1, gib=24))
    assert "do not fit twice into a GPU of 24.0 GiB" in error.message
    assert "needs 17.0 GiB" in error.message and "10.8 GiB" in error.message
    assert chosen(host(2, gib=24)).up.decode_gpus == "1"
    assert "do not fit into a GPU of 24.0 GiB" in refused(host(2, gib=24), weights_gib=30).message
    assert chosen(host(4, gib=24), tp=2, weights_gib=30).up.decode_gpus == "2,3"
    assert chosen(host(1, gib=None), weights_gib=999).up.decode_gpus == "0"


def test_cpus_where_there_is_no_gpu_or_none_is_wanted() -> None:
    choice = chosen(host(0))
    assert (
        choice.up == UpConfig(mode="disaggregated") and "CPU: this host has no GPU" in choice.line
    )
    choice = chosen(host(2), UpConfig(mode="disaggregated", num_decode_nodes=2), device="cpu")
    assert (
        choice.up == UpConfig(mode="disaggregated", num_decode_nodes=2)
        and "--device cpu" in choice.line
    )
    assert (
        "exclude each other"
        in refused(host(2), UpConfig(mode="disaggregated", decode_gpus="1"), device="cpu").message
    )
    assert "no GPU" in refused(host(0), device="cuda").message
    assert "no GPU" in refused(host(0), UpConfig(mode="disaggregated", decode_gpus="1")).message
    both = UpConfig(mode="disaggregated", prefill_gpus="0", decode_gpus="1")
    assert chosen(host(0), both).up == both, "perhaps the driver has no tools here"


def test_one_flag_leaves_the_rest_to_the_other_role() -> None:
    choice = chosen(host(4), UpConfig(mode="disaggregated", prefill_gpus="1"))
    assert (choice.up.prefill_gpus, choice.up.decode_gpus) == ("1", "0,2,3")
    choice = chosen(host(4), UpConfig(mode="disaggregated", decode_gpus="0,1"), tp=2)
    assert (choice.up.prefill_gpus, choice.up.decode_gpus) == ("2,3", "0,1")
    error = refused(host(2), UpConfig(mode="disaggregated", prefill_gpus="0,1"))
    assert "the rest is too few for an engine" in error.message and "--decode-gpus" in error.hint
    choice = chosen(host(4), gpus="2,3")
    assert (choice.up.prefill_gpus, choice.up.decode_gpus) == ("2", "3")


@pytest.mark.parametrize(
    ("up", "words"),
    [
        (
            UpConfig(mode="disaggregated", prefill_gpus="7", decode_gpus="0"),
            "--prefill-gpus 7: this host has GPUs 0",
        ),
        (UpConfig(mode="disaggregated", decode_gpus="0,x"), "--decode-gpus 0,x: not a list"),
        (
            UpConfig(mode="disaggregated", decode_gpus="0,0"),
            "--decode-gpus 0,0: not a list of different GPUs",
        ),
        (UpConfig(mode="disaggregated", decode_gpus="0,00"), "--decode-gpus 0,00: not a list"),
        (UpConfig(mode="disaggregated", decode_gpus=""), "--decode-gpus : not a list"),
        (UpConfig(mode="disaggregated", num_decode_nodes=2), "--num-decode-nodes 2 is for CPUs"),
    ],
)
def test_gpus_that_cannot_be_had(up: UpConfig, words: str) -> None:
    assert words in refused(host(2), up).message
    assert (
        "does not divide"
        in refused(host(4), UpConfig(mode="disaggregated", decode_gpus="1"), tp=2).message
    )
    assert "smaller --tp" in refused(host(2), tp=4).hint


def test_explicit_flags_that_share_a_gpu_get_half_of_it_each() -> None:
    choice = chosen(host(2), UpConfig(mode="disaggregated", prefill_gpus="0", decode_gpus="0"))
    assert choice.engine.gpu_memory_utilization == 0.45
    assert choice.line.startswith("prefill on GPU 0, decode on GPU 0")


def test_up_begins_with_one_line_on_what_it_chose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_choice, "find_host_gpus", lambda: host(2))
    deployed = up.start(
        UpConfig(mode="disaggregated"),
        EngineConfig(),
        NodeConfig(),
        GatewayConfig(),
        ClusterConfig(),
    )
    deployed.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("prefill on GPU 0, decode on GPU 1")
    (found,) = doctor.check_placement(doctor.Subject())
    assert found.text == line


@pytest.mark.parametrize(
    ("tp", "prefill", "decode", "count"),
    [(1, "0,1", "2", 3), (2, "0,1", "2,3", 2), (2, "0,1,2,3", "4,5", 3), (1, None, None, 2)],
)
def test_an_engine_of_several_gpus_is_waited_for_once(
    tp: int, prefill: str | None, decode: str | None, count: int
) -> None:
    up = UpConfig(mode="disaggregated", prefill_gpus=prefill, decode_gpus=decode)
    engine = EngineConfig(tensor_parallel_size=tp)
    deployment = Deployment(up, engine, NodeConfig(), GatewayConfig(), lambda name, line: None)
    assert deployment.num_engines() == count


# --- what the driver reports ----------------------------------------------------------------------


def playing(answer: str) -> Callable[[Sequence[str]], str]:
    return lambda command: answer


def test_nvidia_smi_s_lines() -> None:
    devices = host_gpus._from_nvidia_smi(playing(SMI))
    assert [d.total_bytes for d in devices] == [143771 << 20, 24564 << 20, None]
    assert devices[1].name == "NVIDIA GeForce RTX 4090, of somebody"
    for broken in ("", "No devices were found\n", "NVIDIA-SMI has failed, because", "GPU-x\n"):
        assert len(host_gpus._from_nvidia_smi(playing(broken))) == broken.startswith("GPU-")


def test_a_driver_without_its_tools(tmp_path: Path) -> None:
    assert host_gpus._from_proc(tmp_path) == []
    for bus in ("0000:1b:00.0", "0000:0a:00.0"):
        (tmp_path / bus).mkdir()
        text = f"Model: \t\t NVIDIA {bus[5:7]}\nIRQ:   \t 9\nGPU UUID: \t GPU-{bus[5:7]}\n"
        (tmp_path / bus / "information").write_text(text)
    found = host_gpus._from_proc(tmp_path)
    assert found == [HostGpu("NVIDIA 0a", None, "GPU-0a"), HostGpu("NVIDIA 1b", None, "GPU-1b")]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (None, ["a", "b", "c"]),
        ("2,0", ["c", "a"]),
        ("GPU-bb", ["b"]),
        ("1,9,0", ["b"]),
        ("0,-1,2", ["a"]),
        ("MIG-1", ["MIG device"]),
        ("", []),
        ("-1", []),
        ("GPU-", []),
        ("0,0", []),
        ("1,GPU-b", []),
        ("MIG-1,MIG-1", []),
        ("MIG-1,MIG-2", ["MIG device", "MIG device"]),
    ],
)
def test_the_environment_hides_gpus_and_renumbers_them(
    wanted: str | None, names: list[str]
) -> None:
    devices = [HostGpu(name, GIB, f"GPU-{name * 4}") for name in "abc"]
    environment = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
    found = host_gpus.usable(devices, environment, torch_has_cuda=True)
    assert [gpu.name for gpu in found.gpus] == names
    assert bool(found.why_none) == (not names)


def test_gpus_that_torch_cannot_use_are_none() -> None:
    found = host_gpus.usable([HostGpu("a", GIB, "GPU-a")], {}, torch_has_cuda=False)
    assert found.gpus == () and "build for CPUs" in found.why_none


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    import torch

    assert host_gpus._torch_has_cuda() == (torch.version.cuda is not None)
    assert host_gpus._run(["/nonexistent/nvidia-smi"]) == ""
    assert host_gpus._run(["false"]) == ""
