"""Imports the Gluon kernels, which need a Hopper GPU; Gluon may change between Triton versions."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import torch

log = logging.getLogger(__name__)


@functools.cache
def gluon_kernels(name: str, device: torch.device) -> ModuleType | None:
    """The module `name` below this folder, as "products.name"; None if `device` cannot run it or
    this Triton has another Gluon."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        return importlib.import_module(f".{name}", __package__)
    except (ImportError, AttributeError) as error:
        log.warning("%s is not used, since this Triton has another Gluon: %s", name, error)
        return None
