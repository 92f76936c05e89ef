"""Cached launches: each compiled kernel gets the arguments that it was compiled for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.kernels import launched as launching
from baton.kernels.launched import Launched, cdiv, launched, next_power_of_2


class Jit:
    """Plays `triton.JITFunction`: compiles again for each launch that reaches it."""

    arg_names = ("x", "count", "BLOCK", "HAS_BIAS")

    def __init__(self) -> None:
        self.launches: list[tuple[int, tuple[int, ...], tuple[Any, ...]]] = []
        self.num_compiled = 0
        names = enumerate(self.arg_names)
        self.params = [SimpleNamespace(name=name, is_constexpr=n >= 2) for n, name in names]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            number = self.num_compiled
            self.num_compiled += 1
            self.launches.append((number, grid, (*args, *options.values())))
            return Compiled(self, number)

        return run


class Compiled:
    def __init__(self, of: Jit, number: int) -> None:
        self._of, self._number = of, number

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self._of.launches.append((self._number, grid, args))


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Jit:
    monkeypatch.setattr(launching.triton, "JITFunction", Jit)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Jit()


def test_a_kernel_is_found_again_with_its_constants_in_order(jit: Jit) -> None:
    kernel, x = Launched(jit), torch.zeros(64)
    for _ in range(2):
        kernel[(3,)](x, 32, HAS_BIAS=True, num_warps=4, BLOCK=128)
    assert jit.num_compiled == 1
    number, grid, args = jit.launches[1]
    assert (number, grid) == (0, (3, 1, 1))
    assert args[0] is x and args[1:] == (32, 128, True)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": torch.zeros(64)[1:]},  # not aligned
        {"x": None},
        {"count": 1},
        {"count": 33},
        {"count": 1 << 35},
        {"count": 1 << 63},
        {"count": True},
        {"count": 32.0},
        {"BLOCK": 64},
        {"num_warps": 8},
    ],
)
def test_what_triton_distinguishes_is_compiled_apart(jit: Jit, other: dict[str, Any]) -> None:
    kernel = Launched(jit)
    usual = {"x": torch.zeros(64), "count": 32, "BLOCK": 128, "HAS_BIAS": False, "num_warps": 4}
    for values in (usual, usual | {"count": 48}, usual | other, usual):
        x, count, *_ = values.values()
        options = {name: values[name] for name in ("BLOCK", "HAS_BIAS", "num_warps")}
        kernel[(1,)](x, count, **options)
    assert jit.num_compiled == 2
    assert [number for number, *_ in jit.launches] == [0, 0, 1, 0]


NUMBERS = [0, 1, -1, 16, *(edge + by for edge in (1 << 31, 1 << 63) for by in (-16, -1, 0, 1, 16))]
NUMBERS += [-(1 << 31) - 16, -(1 << 31) - 1, -(1 << 31), -(1 << 31) + 1, -(1 << 63), -(1 << 63) + 1]


def test_numbers_of_a_kind_have_one_type_in_triton() -> None:
    types: dict[Any, Any] = {}
    for number in NUMBERS:
        found = native_specialize_impl(CUDABackend, number, False, True, True)
        assert types.setdefault(launching._kind(number), found) == found, number


def test_descriptors_are_told_apart_by_type_and_box_alone(jit: Jit) -> None:
    kernel = Launched(jit)
    for rows, dtype, box, number in (
        (8, torch.float32, [4, 16], 0),
        (9, torch.float32, [4, 16], 0),  # the number of rows is an argument
        (8, torch.float32, [8, 16], 1),
        (8, torch.bfloat16, [4, 16], 2),
    ):
        x = TensorDescriptor.from_tensor(torch.zeros(rows, 16, dtype=dtype), box)
        kernel[(1,)](x, 32, BLOCK=128, HAS_BIAS=False)
        assert jit.launches[-1][0] == number


def test_another_device_compiles_anew(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Launched(jit), torch.zeros(64)
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        kernel[(1,)](x, 32, BLOCK=128, HAS_BIAS=False)
    assert jit.num_compiled == 2


@pytest.mark.parametrize("args", [(), (1, 2, 3)])
def test_constants_are_named_and_nothing_else_is(jit: Jit, args: tuple[int, ...]) -> None:
    names = dict.fromkeys(Jit.arg_names[len(args) :], 1)
    with pytest.raises(TypeError, match="by name"):
        Launched(jit)[(1,)](*args, **names)


def test_numbers() -> None:
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [triton.cdiv(n, 4) for n in (0, 1, 4, 5)]
    found = [next_power_of_2(n) for n in range(1, 70)]
    assert found == [triton.next_power_of_2(n) for n in range(1, 70)]


@launched
@triton.jit
def _add(x, out, by, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count) + by, mask=at < count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_launches_on_a_gpu() -> None:
    for count, dtype, _ in ((n, d, i) for i in range(3) for n in (1, 16, 33) for d in (4, 8)):
        whole = torch.arange(64, device="cuda", dtype={4: torch.int32, 8: torch.int64}[dtype])
        for x in (whole[:count], whole[1 : count + 1]):
            out = torch.zeros_like(x)
            _add[(cdiv(count, 32),)](x, out, 5, count, BLOCK=32, num_warps=1)
            assert torch.equal(out, x + 5)
