"""Triton's interpreter as the tests use it: mended where it is broken, and without work that it
does in vain, which was half of its time.

    every call of a kernel's function   Triton replaces all of its language once more: here once a
                                        launch, for each set of language modules
    every sum and product of integers   Triton looks for an overflow in 64 bits, and asserts it only
                                        with its debug option: here without that option it does not
    every array                         Triton makes a table of types anew: here it is kept
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from triton import language
from triton.runtime import interpreter


def prepare() -> None:
    """Before any kernel runs in it."""
    _accept_arrays_of_one_element()
    _replace_language_once_a_launch()
    _keep_types_of_arrays()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _accept_arrays_of_one_element() -> None:
    """Triton 3.6 calls int() on them, which numpy 2.4 no longer allows."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


def _keep_types_of_arrays() -> None:
    """By name: types of pointers have no hash."""
    find, found = interpreter._get_np_dtype, {}

    def find_once(dtype: Any) -> Any:
        if (known := found.get(dtype.name)) is None:
            known = found[dtype.name] = find(dtype)
        return known

    interpreter._get_np_dtype = find_once


def _replace_language_once_a_launch() -> None:
    """A function that another one calls finds it replaced by the functions called before it."""
    patch, call = interpreter._patch_lang, interpreter.InterpretedFunction.__call__
    replaced: set[frozenset[int]] = set()
    is_nested = False

    @functools.cache
    def modules_of(function: Callable[..., Any]) -> frozenset[int]:
        modules = (language, language.core)
        return frozenset(
            id(value)
            for value in function.__globals__.values()
            if any(value is module for module in modules)
        )

    def patch_once(function: Callable[..., Any]) -> Any:
        modules = modules_of(function)
        if is_nested and modules in replaced:
            return None
        if not is_nested:
            replaced.clear()
        replaced.add(modules)
        return patch(function)

    def call_nested(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_nested
        before, is_nested = is_nested, True
        try:
            return call(self, *args, **kwargs)
        finally:
            is_nested = before

    interpreter._patch_lang = patch_once
    interpreter.InterpretedFunction.__call__ = call_nested
