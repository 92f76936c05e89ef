"""`baton doctor`: checks this host before anything is started, one line per finding.

Every check is a function from the subject to findings and can be called alone; the table at the end
has the order in which they run.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement

from ...cluster.redis_client import answering_redis
from ...cluster.redis_server import find_redis_server
from ...core.config import NodeConfig, UpConfig
from ...core.engine_config import EngineConfig
from ...core.errors import HandoffFailed, StartupFailed
from ...core.model_dir import resolve_model_dir
from .finding import Finding, exit_code, ok, problem, render, warning
from .gpu_choice import choose_here

_DISTRIBUTION = "baton-serve"
_MIN_REDIS = (6,)
_MIN_FREE_SHARE = 0.5  # of a GPU's memory; the default --gpu-memory-utilization is 0.9
_MIN_SHM_BYTES = 64 << 20
_KV_BYTES = 256 << 20  # what a CPU node takes by default


@dataclass(frozen=True, slots=True)
class Subject:
    """What to check, besides the host itself."""

    model: str = "demo"
    redis_url: str | None = None
    ports: tuple[int, ...] = ()


def run(subject: Subject) -> int:
    findings = []
    for name, check in CHECKS:
        try:
            found = check(subject)
        except Exception as error:  # a broken package may raise anything: the others still count
            found = [problem(name, f"the check failed: {type(error).__name__}: {error}")]
        if found:
            print(render(found), flush=True)
        findings += found
    return exit_code(findings)


def check_python(subject: Subject) -> list[Finding]:
    system, machine = platform.system(), platform.machine()
    text = f"{platform.python_version()} on {system} {machine}"
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        return [problem("python", text, "Baton runs on Python 3.11 and 3.12")]
    if system != "Linux":
        return [problem("python", text, "nodes need Linux: memfd, abstract sockets")]
    if machine != "x86_64":
        return [warning("python", text, "only x86-64 is tested")]
    return [ok("python", text)]


def check_packages(subject: Subject) -> list[Finding]:
    """The packages that the installed distribution requires, without extras."""
    try:
        lines = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        text = "is importable, but not installed"
        return [problem(_DISTRIBUTION, text, "pip install -e . in its folder")]
    return [check_requirement(line) for line in lines if "extra ==" not in line]


def check_requirement(line: str) -> Finding:
    """Whether a package like `grpcio>=1.71.2` is installed, by metadata alone."""
    wanted = Requirement(line)
    advice = f"pip install '{wanted.name}{wanted.specifier}'"
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return problem(wanted.name, "is missing", advice)
    if not wanted.specifier.contains(version, prereleases=True):
        return problem(wanted.name, f"{version}, but {wanted.specifier} is needed", advice)
    return ok(wanted.name, version)


def check_torch(subject: Subject) -> list[Finding]:
    import torch

    text = f"{torch.__version__}, " + (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    )
    if shutil.which("nvidia-smi") and not torch.cuda.is_available():
        advice = (
            "the driver may be too old for this build, or CUDA_VISIBLE_DEVICES hides the GPUs"
            if torch.version.cuda
            else "pip install a CUDA build of torch"
        )
        return [
            warning("torch build", f"{text}: sees no GPU, though this host has a driver", advice)
        ]
    return [ok("torch build", text)]


def check_gpus(subject: Subject) -> list[Finding]:
    found = find_gpus()
    has_triton, has_flashinfer = map(importlib.util.find_spec, ("triton", "flashinfer"))
    kernels = judge_kernels(bool(found), bool(has_triton), bool(has_flashinfer))
    return [*judge_gpus(found), *kernels]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device; `peers`: indices of the devices whose memory it can map."""

    index: int
    name: str
    free_bytes: int
    total_bytes: int
    peers: frozenset[int]


def find_gpus() -> list[Gpu]:
    import torch

    found, indices = [], range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    for index in indices:
        can_access = torch.cuda.can_device_access_peer
        peers = frozenset(i for i in indices if i != index and can_access(index, i))
        memory = torch.cuda.mem_get_info(index)  # free, total
        found.append(Gpu(index, torch.cuda.get_device_name(index), *memory, peers))
    return found


def judge_gpus(gpus: Sequence[Gpu]) -> list[Finding]:
    """One finding for each GPU, and one for the paths between them."""
    if not gpus:
        return [ok("GPUs", "none: engines run on the CPU")]
    findings = [_judge_gpu_memory(gpu) for gpu in gpus]
    missing = [
        f"{gpu.index}-{other.index}"
        for gpu in gpus
        for other in gpus
        if gpu.index < other.index and other.index not in gpu.peers
    ]
    if missing:
        findings.append(
            warning(
                "peer access",
                f"none between {', '.join(missing)}",
                "KV cannot be read over NVLink or PCIe there: pair other GPUs",
            )
        )
    elif len(gpus) > 1:
        findings.append(ok("peer access", "between all GPUs"))
    return findings


def _judge_gpu_memory(gpu: Gpu) -> Finding:
    text = f"{gpu.name}, {gpu.free_bytes / 2**30:.0f} of {gpu.total_bytes / 2**30:.0f} GiB free"
    if gpu.free_bytes < _MIN_FREE_SHARE * gpu.total_bytes:
        advice = "another process holds its memory (nvidia-smi): an engine takes what is left"
        return warning(f"GPU {gpu.index}", text, advice)
    return ok(f"GPU {gpu.index}", text)


def judge_kernels(has_gpu: bool, has_triton: bool, has_flashinfer: bool) -> list[Finding]:
    """Findings for the packages that only GPU engines use."""
    if not has_gpu:
        return [ok("GPU kernels", "not needed without a GPU")]
    advice = "pip install 'baton-serve[gpu]'"
    return [
        ok("triton", "found")
        if has_triton
        else problem("triton", "is missing, and a GPU engine needs it", advice),
        ok("flashinfer", "found")
        if has_flashinfer
        else warning("flashinfer", "is missing: attention runs on slower Triton kernels", advice),
    ]


def check_redis_server(subject: Subject) -> list[Finding]:
    """The Redis server that `baton up` starts unless it has a URL."""
    try:
        program = find_redis_server()
    except StartupFailed as error:
        kind = warning if subject.redis_url else problem
        return [kind("redis-server", error.message, error.hint)]
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"v=([0-9.]+)", result.stdout)
    if match is None:
        return [warning("redis-server", f"{program} does not report its version")]
    return [judge_redis("redis-server", match[1], f"at {program}")]


def check_redis_url(subject: Subject) -> list[Finding]:
    if (url := subject.redis_url) is None:
        return []

    async def ask(url: str) -> str:
        async with answering_redis(url, "doctor") as client:
            [info] = await client.run(("INFO", "server"))
        return str(info["redis_version"])

    try:
        return [judge_redis("redis", asyncio.run(ask(url)), "answers")]
    except StartupFailed as error:
        return [problem("redis", error.message, error.hint)]


def judge_redis(subject: str, version: str, text: str) -> Finding:
    """Whether this version of Redis is new enough."""
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    if numbers < _MIN_REDIS:
        return problem(subject, f"{version} {text}", f"Redis {_MIN_REDIS[0]} or newer is needed")
    return ok(subject, f"{version} {text}")


def check_ports(subject: Subject) -> list[Finding]:
    return [check_port(port) for port in subject.ports]


def check_port(port: int) -> Finding:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            ports = "another --grpc-port or --http-port (0 takes a free one)"
            advice = f"{ports}, or stop the process that listens there"
            return problem(f"port {port}", f"is not available: {error}", advice)
    return ok(f"port {port}", "free")


def check_memory(subject: Subject) -> list[Finding]:
    return [check_available_memory(_available_bytes()), check_shm("/dev/shm"), check_memfd()]


def _available_bytes() -> int:
    with open("/proc/meminfo") as table:
        for line in table:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def check_available_memory(num_bytes: int) -> Finding:
    text = f"{num_bytes / 2**30:.1f} GiB available"
    if num_bytes < 2 * _KV_BYTES:
        return warning("memory", text, "a smaller --cpu-kv-bytes, or fewer nodes")
    return ok("memory", text)


def check_shm(path: str) -> Finding:
    """Shared memory of libraries (NCCL, torch) is there; Baton's KV is in memfds."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return warning(path, f"cannot be read: {error.strerror}", "mount a tmpfs there")
    free_bytes = stat.f_bavail * stat.f_frsize
    text = f"{free_bytes / 2**20:.0f} MiB free"
    if free_bytes < _MIN_SHM_BYTES:
        return warning(path, text, "in a container: --shm-size=1g")
    return ok(path, text)


def check_memfd() -> Finding:
    """Make, seal and map a piece of shared memory as a CPU node does with its KV pool."""
    from ...engine.kv import memfd

    try:
        fd, memory = memfd.create("baton-doctor", 4096)
        try:
            memfd.map_read_only(fd, 4096).close()
        finally:
            memory.close()
            os.close(fd)
    except (StartupFailed, HandoffFailed) as error:
        return problem("memfd", error.message, "Linux 5.1 or newer; a sandbox may forbid it")
    return ok("memfd", "can be shared and sealed")


def check_model(subject: Subject) -> list[Finding]:
    """Whether the model is complete and its architecture is supported."""
    from ...engine.execution.model_loading import check_checkpoint
    from ...engine.model.model_config import read_model_config
    from ...gateway.text.tokenizer_file import load_tokenizer

    try:
        folder = resolve_model_dir(subject.model)
        config = read_model_config(folder)
        check_checkpoint(folder, config)
        load_tokenizer(folder)
    except StartupFailed as error:
        return [problem("model", error.message, error.hint)]
    layers, context = config.num_layers, config.max_position_embeddings
    stored = f", {config.quantization.name}" if config.quantization else ""
    return [ok("model", f"{subject.model}: {layers} layers, context {context}{stored}, complete")]


def check_placement(subject: Subject) -> list[Finding]:
    """How `baton up` would use the GPUs; no finding for a model that `check_model` refuses."""
    if exit_code(check_model(subject)):
        return []
    try:
        choice = choose_here(UpConfig(), EngineConfig(model=subject.model), NodeConfig())
    except StartupFailed as error:
        return [problem("baton up", error.message, error.hint)]
    return [ok("baton up", choice.line)]


Check = Callable[[Subject], list[Finding]]

CHECKS: tuple[tuple[str, Check], ...] = (
    ("python", check_python),
    ("packages", check_packages),
    ("torch", check_torch),
    ("GPUs", check_gpus),
    ("redis-server", check_redis_server),
    ("redis", check_redis_url),
    ("ports", check_ports),
    ("memory", check_memory),
    ("model", check_model),
    ("baton up", check_placement),
)
