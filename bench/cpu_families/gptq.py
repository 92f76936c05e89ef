"""GPTQ (Frantar et al. 2022) of a small model: int4 weights that preserve its layers' outputs.

Rounds each weight column by column and compensates each error in the remaining columns, weighted by
the inputs on a calibration text: H = X^T X. Layers are quantised in order, each on the outputs of
the already quantised layers. Writes a checkpoint in GPTQ's format, symmetric, in groups of 128.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.model.decoder import Decoder
from baton.kernels.layers.ops import Ops
from baton.kernels.products.weights import Activations, Weight

GROUP, _ZERO, _LARGEST = 128, 8, 15
_DAMPING = 0.01  # of the mean of H's diagonal
_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_SHRUNK = tuple(1 - step / 40 for step in range(12))  # of a group's largest number


class RecordingOps(Ops):
    """Accumulates X^T X over the products with each selected weight."""

    def __init__(self) -> None:
        self.hessians: dict[int, Tensor] = {}

    def linear(self, x: Activations, weight: Weight, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        if id(weight) in self.hessians:
            self.hessians[id(weight)] += x.t().double() @ x.double()
        return super().linear(x, weight, bias)


def round_by(weight: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """weight [outputs, inputs], hessian [inputs, inputs] -> integers 0 to 15 of the weight's shape,
    and scales [outputs, groups]."""
    left, hessian = weight.double().clone(), hessian.clone()
    is_dead = hessian.diagonal() == 0
    hessian.diagonal()[is_dead] = 1
    hessian.diagonal().add_(_DAMPING * hessian.diagonal().mean())
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    numbers = torch.empty_like(weight, dtype=torch.uint8)
    scales = []
    for column in range(weight.shape[1]):
        if column % GROUP == 0:
            scales.append(_scale_of(left[:, column : column + GROUP]))
        scale = scales[-1]
        rounded = _rounded(left[:, column], scale)
        numbers[:, column] = rounded.to(torch.uint8)
        error = (left[:, column] - (rounded - _ZERO) * scale) / inverse[column, column]
        left[:, column + 1 :] -= error[:, None] * inverse[column, column + 1 :]
    return numbers, torch.stack(scales, dim=1)


def _scale_of(group: Tensor) -> Tensor:
    """The scale of each output of a group [outputs, inputs]: the candidate of least squared
    error."""
    largest = group.abs().amax(dim=1).clamp_(min=1e-10) * 2 / _LARGEST
    candidates = torch.stack([(largest * share).half().double() for share in _SHRUNK])
    scales = candidates[:, :, None]
    errors = ((_rounded(group, scales) - _ZERO) * scales - group).square().sum(dim=2)
    return candidates.gather(0, errors.argmin(dim=0)[None])[0]


def _rounded(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).round().add_(_ZERO).clamp_(0, _LARGEST)


def quantise(model: Decoder, ops: RecordingOps, run: Callable[[], object]) -> dict[str, Tensor]:
    """Returns the checkpoint's tensors and replaces the weights in `model` by their dequantised
    values.

    `run` computes the calibration text. The model must use `ops` and have float weights.
    """
    found: dict[str, Tensor] = {}
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        parts = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        for part in parts:
            inputs = part.weight.shape[1]
            ops.hessians[id(part.weight)] = torch.zeros(inputs, inputs, dtype=torch.float64)
        run()
        for part in parts:
            hessian = ops.hessians.pop(id(part.weight))
            for name in (f"{one.name}.weight" for one in part.outputs):
                target = model.targets[name]
                assert isinstance(target.tensor, Tensor)
                numbers, scale = round_by(target.tensor, hessian)
                each = scale.repeat_interleave(GROUP, dim=1)
                target.tensor.copy_((numbers.double() - _ZERO) * each)
                module = name.removesuffix(".weight")
                found |= {f"{module}.{key}": one for key, one in _packed(numbers, scale).items()}
    return found


def _packed(numbers: Tensor, scale: Tensor) -> dict[str, Tensor]:
    inputs = numbers.shape[1]
    zeros = torch.full((scale.shape[1], len(scale)), _ZERO - 1)  # the format stores zeros - 1
    return {
        "qweight": _words(numbers.t()),
        "qzeros": _words(zeros.t()).t().contiguous(),
        "scales": scale.half().t().contiguous(),
        "g_idx": (torch.arange(inputs) // GROUP).int(),
    }


def _words(values: Tensor) -> Tensor:
    """Pack eight rows into one, the first in the lowest bits."""
    shifts = 4 * torch.arange(8)[:, None]
    return (values.long().unflatten(0, (-1, 8)) << shifts).sum(dim=1).int()


def write_checkpoint(folder: Path, source: Path, made: dict[str, Tensor]) -> Path:
    """Write the checkpoint at `source` with the quantised tensors `made` in place of its
    projections."""
    modules = {name.rsplit(".", 1)[0] for name in made}
    plain = load_file(source / "model.safetensors")
    kept = {name: one for name, one in plain.items() if name.removesuffix(".weight") not in modules}
    save_file(kept | made, folder / "model.safetensors")
    settings = json.loads((source / "config.json").read_text())
    settings["quantization_config"] = _CONFIG
    (folder / "config.json").write_text(json.dumps(settings))
    return folder
