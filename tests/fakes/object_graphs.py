"""Graphs of plain Python objects as states of a search: their value, and copies of them.

`frozen` and `forked` replace hashing and copy.deepcopy, ten times faster: immutable values (frozen
dataclasses and structs, named tuples, errors, ...) are shared, not copied.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Hashable
from functools import cache, partial
from types import MethodType
from typing import Any

import msgspec
import numpy as np

from .clock import FakeClock

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def frozen(value: Any, above: tuple[int, ...] = ()) -> Hashable:
    """The value of an object, as a hashable: objects with equal values behave alike.

    Dicts keep their order, which FIFOs depend on. Clocks and callables are left out: clocks are
    part of the state that a search keeps itself, callables do not change. `above` holds the ids on
    the path here: an object that refers back to one that contains it ends the walk.
    """
    kind = type(value)
    if kind in _PLAIN or isinstance(value, enum.Enum):
        return value
    if kind is list or kind is tuple or kind is deque:
        return tuple([frozen(each, above) for each in value])
    if isinstance(value, tuple):  # named tuples
        return (kind.__name__, *[frozen(each, above) for each in value])
    if kind is dict or kind is OrderedDict:
        return tuple([(frozen(k, above), frozen(v, above)) for k, v in value.items()])
    if kind is bytearray:
        return bytes(value)
    if kind is np.ndarray:
        return value.tobytes()  # type: ignore[no-any-return]
    if kind is set or kind is frozenset:
        return frozenset([frozen(each, above) for each in value])
    if kind is FakeClock or callable(value) or id(value) in above:
        return None
    if isinstance(value, BaseException):
        return "error"  # error contents do not affect behaviour
    above = (*above, id(value))
    return (kind.__name__, *[frozen(getattr(value, name), above) for name in _fields(value)])


def forked(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy that shares no mutable object."""
    memo = {} if memo is None else memo
    kind = type(value)
    if kind in _PLAIN or id(value) in memo:
        return memo.get(id(value), value)
    if kind is list or kind is deque or kind is set:
        copied = kind(forked(each, memo) for each in value)
    elif kind is tuple:
        return tuple([forked(each, memo) for each in value])
    elif kind is dict or kind is OrderedDict:
        copied = kind((forked(k, memo), forked(v, memo)) for k, v in value.items())
    elif kind is bytearray:
        copied = bytearray(value)
    elif kind is MethodType:
        return MethodType(value.__func__, forked(value.__self__, memo))
    elif kind is partial:
        return partial(forked(value.func, memo), *value.args)
    elif _is_constant(kind) or callable(value):
        return value
    else:
        copied = memo[id(value)] = kind.__new__(kind)
        for name in _fields(value):
            setattr(copied, name, forked(getattr(value, name), memo))
    memo[id(value)] = copied
    return copied


@cache
def _is_constant(kind: type) -> bool:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_config__.frozen
    params = getattr(kind, "__dataclass_params__", None)
    is_frozen = params is not None and params.frozen
    return is_frozen or issubclass(kind, (enum.Enum, BaseException, frozenset, tuple))


@cache
def _slots(kind: type) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return tuple(name for cls in kind.__mro__ for name in getattr(cls, "__slots__", ()))


def _fields(value: Any) -> tuple[str, ...]:
    return (*_slots(type(value)), *getattr(value, "__dict__", ()))
