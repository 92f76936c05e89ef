"""Triton's interpreter as the tests use it: with fixes of its bugs, and without redundant work that
took half of its time.

    every call of a kernel's function   Triton patches its whole language again: here once per
                                        launch, for each set of language modules
    every integer sum and product       Triton checks for 64-bit overflow, but asserts it only
                                        with its debug option: here it checks only with that
    every array                         Triton rebuilds a table of types: here it is cached
    every value                         Triton rebuilds its type and shape, of a dozen objects
                                        each: here they are made once per type
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from triton import language
from triton.runtime import interpreter


def prepare() -> None:
    """Install all fixes, before any kernel runs in the interpreter."""
    _accept_arrays_of_one_element()
    _replace_language_once_a_launch()
    _keep_types_of_arrays()
    _keep_types_of_values()
    _call_builtins_directly()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _accept_arrays_of_one_element() -> None:
    """Triton 3.6 calls int() on one-element arrays, which numpy 2.4 no longer allows."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


def _keep_types_of_arrays() -> None:
    """Cache by name: pointer types have no hash."""
    find, found = interpreter._get_np_dtype, {}

    def find_once(dtype: Any) -> Any:
        if (known := found.get(dtype.name)) is None:
            known = found[dtype.name] = find(dtype)
        return known

    interpreter._get_np_dtype = find_once


def _keep_types_of_values() -> None:
    """Values cached for a block type depend on its name, except the type of its elements."""
    core, semantic = language.core, interpreter.TritonSemantic
    of_block, broadcast = core.block_type.__init__, semantic.broadcast_impl_value
    equals, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    promote, promoted = semantic.computation_type_impl, {}
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, type(None)}
    one, no_shape = core.constexpr(1), core.tuple([])
    found: dict[Any, dict[str, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if (known := found.get(key)) is None:
            of_block(self, element_ty, shape)
            self.tensor_numel = core.constexpr(self.numel)
            self.tensor_shape = core.tuple([core.constexpr(size) for size in self.shape])
            found[key] = dict(vars(self))
        else:
            vars(self).update(known)
            self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        is_block = type.is_block()
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel = type.tensor_numel if is_block else one
        self.shape = type.tensor_shape if is_block else no_shape

    def broadcast_what_differs(self: Any, lhs: Any, rhs: Any) -> Any:
        is_same = lhs.shape is rhs.shape or lhs.shape.values == rhs.shape.values
        return (lhs, rhs) if is_same else broadcast(self, lhs, rhs)

    def is_equal(self: Any, other: Any) -> bool:
        return self is other or equals(self, other)

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    def promote_once(self: Any, a: Any, a_is_scalar: bool, b: Any, *more: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, *more)
        if (known := promoted.get(key)) is None:
            known = promoted[key] = promote(self, a, a_is_scalar, b, *more)
        return known

    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor
    core.dtype.__eq__ = is_equal
    core._unwrap_if_constexpr = unwrap_if_constexpr
    semantic.computation_type_impl = promote_once
    semantic.broadcast_impl_value = broadcast_what_differs


def _call_builtins_directly() -> None:
    """Triton copies the arguments by name, then looks for an argument that it has added."""
    semantic = interpreter.interpreter_semantic

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = inspect.unwrap(member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch


def _replace_language_once_a_launch() -> None:
    """A function called by another one finds the language patched by its callers."""
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
