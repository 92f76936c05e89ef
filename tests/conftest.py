"""Shared by all tests: puts this folder on the path, so that tests can import `fakes`.

Without a GPU the Triton kernels run in Triton's interpreter, which is chosen at its first import:
here, before any test module can import it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))


def _repair_interpreter() -> None:
    """Triton 3.6 calls int() on arrays of one element, which numpy 2.4 no longer allows."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _repair_interpreter()
