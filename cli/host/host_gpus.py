"""The GPUs that engines of this host may use, as the driver reports them: no torch, no CUDA
context.

A GPU's index is that of `--gpus`: its position among the GPUs that CUDA_VISIBLE_DEVICES leaves, in
the order of nvidia-smi, by PCI bus. If the GPUs of a host differ, CUDA uses this order only with
CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_ASK_TIMEOUT_S = 20.0  # the first query takes seconds if the driver must be loaded
_QUERY = ("nvidia-smi", "--query-gpu=uuid,memory.total,name", "--format=csv,noheader,nounits")
_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class HostGpu:
    """`total_bytes` is None if the driver does not report it."""

    name: str
    total_bytes: int | None = None
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class HostGpus:
    """All usable GPUs, by index; `why_none`: why there are none that torch could use."""

    gpus: tuple[HostGpu, ...] = ()
    why_none: str = ""


def find_host_gpus() -> HostGpus:
    """The GPUs that the driver, torch's build and the environment make usable. Usually takes less
    than a second."""
    return usable(
        _from_nvidia_smi(_run) or _from_proc(_DRIVER_FOLDER), os.environ, _torch_has_cuda()
    )


def usable(
    devices: Sequence[HostGpu], environment: Mapping[str, str], torch_has_cuda: bool
) -> HostGpus:
    """The driver's devices, indexed as by CUDA."""
    if not devices:
        return HostGpus(why_none="this host has no GPU")
    if not torch_has_cuda:
        return HostGpus(why_none="torch is a build for CPUs, though this host has GPUs")
    if (wanted := environment.get(_VISIBLE)) is not None:
        devices = _visible(devices, wanted)
        if not devices:
            return HostGpus(why_none=f"{_VISIBLE}={wanted} hides this host's GPUs")
    return HostGpus(tuple(devices))


def _visible(devices: Sequence[HostGpu], wanted: str) -> list[HostGpu]:
    """The devices that `wanted` names, by number or by the beginning of a UUID, up to the first
    invalid name; none if a device is named twice, as with CUDA."""
    found: list[HostGpu] = []
    for word in (word.strip() for word in wanted.split(",")):
        if word.startswith("MIG-"):
            matches: Sequence[HostGpu] = [HostGpu("MIG device", uuid=word)]
        elif word.isdecimal():
            matches = devices[int(word) : int(word) + 1]
        else:
            matches = [d for d in devices if word.startswith("GPU-") and d.uuid.startswith(word)]
        if len(matches) != 1:
            break
        if matches[0].uuid and matches[0] in found:
            return []
        found += matches
    return found


def _from_nvidia_smi(run: Callable[[Sequence[str]], str]) -> list[HostGpu]:
    devices = []
    for line in run(_QUERY).splitlines():
        uuid, total_mib, name = [*(part.strip() for part in line.split(",", 2)), "", ""][:3]
        if uuid.startswith("GPU-"):
            total_bytes = int(total_mib) << 20 if total_mib.isdecimal() else None
            devices.append(HostGpu(name, total_bytes, uuid))
    return devices


def _run(command: Sequence[str]) -> str:
    """The command's output; empty if it is not installed, fails or hangs."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def _from_proc(folder: Path) -> list[HostGpu]:
    """The devices by /proc: for a driver without its tools, as in some containers."""
    devices = []
    for path in sorted(folder.glob("*/information")):
        text = path.read_text(errors="replace")
        fields = dict(re.findall(r"^([^:\n]+):\s*(.*?)\s*$", text, re.M))
        devices.append(HostGpu(fields.get("Model", "GPU"), uuid=fields.get("GPU UUID", "")))
    return devices


def _torch_has_cuda() -> bool:
    """Whether torch is a CUDA build, by its version.py: to import torch would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return True  # the engine reports it if not
    match = re.search(r"^cuda\b[^=]*=\s*(.*)$", text, re.M)
    return match is None or match[1] != "None"
