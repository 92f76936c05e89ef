"""Bounds the compiler's work for multipleOf in JSON schemas, on which it has no limit of its own.

For each range of values, the compiler enumerates the remainders of a divisor until one is 0. If
schemas of the same value are merged, the divisor is their least common multiple.

    {"properties": {"a": {..}}}   merged with another "a", and with schemas without a place
    {"$defs": {"n": {..}}}        no place: may be merged with any schema
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.request.constraint import Constraint, ConstraintKind

# A remainder takes 5 us and 0.5 KB on llguidance 1.9.1.
_MAX_REMAINDERS = 100_000
_MAX_DIVISOR = (1 << 32) - 1
_ITEMS = frozenset({"items", "prefixItems"})
_ANYWHERE = frozenset({"additionalProperties", "patternProperties", "$defs", "definitions"})
_TO_ANYWHERE = re.compile(r"#(/(\$defs|definitions)/[^/%~]+)?")
_JSON_IN_LARK = re.compile(r"%json[ \t\r\n]*")
_DECODER = json.JSONDecoder(parse_int=float)
_MAX_SHOWN = 3


class TooManyRemainders(ValueError):
    """The message names the largest multipleOf."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The divisors and bounds in the schemas of one value."""

    divisors: set[float] = field(default_factory=set)
    lows: set[float] = field(default_factory=set)
    highs: set[float] = field(default_factory=set)

    def add(self, schema: Mapping[str, Any]) -> None:
        for numbers, names in (
            (self.divisors, ("multipleOf",)),
            (self.lows, ("minimum", "exclusiveMinimum")),
            (self.highs, ("maximum", "exclusiveMaximum")),
        ):
            found = map(schema.get, names)
            numbers.update(one for one in found if isinstance(one, float) and math.isfinite(one))

    def num_remainders(self, anywhere: _Numbers) -> int:
        """An upper bound on remainders, if `anywhere` is merged with these in all ways."""
        divisor = _common_multiple(self.divisors | anywhere.divisors)
        if re.fullmatch("10*", str(divisor)) and divisor <= _MAX_DIVISOR:
            return 0  # the first remainders tried lead to 0
        num_lows = 1 + len(self.lows | anywhere.lows)
        return divisor * num_lows * (1 + len(self.highs | anywhere.highs))


def count_remainders(constraint: Constraint) -> int:
    """An upper bound on the remainders of all schemas. Skips invalid JSON: the compiler reports it.

    Raises TooManyRemainders.
    """
    num_remainders = 0
    for schema in _schemas(constraint):
        places = _by_place(schema)
        anywhere = places.get("", _Numbers())
        for numbers in places.values():
            num_remainders += numbers.num_remainders(anywhere)
            if num_remainders > _MAX_REMAINDERS:
                largest = sorted(numbers.divisors | anywhere.divisors, reverse=True)[:_MAX_SHOWN]
                raise TooManyRemainders(
                    f"multipleOf {', '.join(f'{value:.15g}' for value in largest)}: there are more "
                    f"than {_MAX_REMAINDERS} remainders to go through"
                )
    return num_remainders


def _schemas(constraint: Constraint) -> Iterator[Any]:
    text, starts = constraint.source, []
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        starts = [len(text) - len(text.lstrip())]
    elif constraint.kind is ConstraintKind.GRAMMAR:
        starts = [match.end() for match in _JSON_IN_LARK.finditer(text)]
    for start in starts:
        try:
            yield _DECODER.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue


def _by_place(schema: Any) -> Mapping[str, _Numbers]:
    """Numbers by the property that the schemas apply to; "" for schemas that may apply to any."""
    found: defaultdict[str, _Numbers] = defaultdict(_Numbers)
    objects = list(_objects_within(schema))
    references = [str(one["$ref"]) for _, one in objects if "$ref" in one]
    is_placed = all(map(_TO_ANYWHERE.fullmatch, references))  # else it may lead to any schema
    for place, one in objects:
        found[place if is_placed else ""].add(one)
    return found


def _objects_within(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All objects with their places ("": none), as a reference may make any object a schema."""
    pending: list[tuple[str, Any, bool]] = [("", schema, False)]
    while pending:
        place, value, is_by_name = pending.pop()
        if isinstance(value, list):
            pending += [(place, inner, False) for inner in value]
        elif isinstance(value, dict):
            yield place, value
            for key, inner in value.items():
                inside = f"{key}/" if is_by_name else place
                if not is_by_name and key in _ANYWHERE:
                    inside = ""
                elif not is_by_name and key in _ITEMS and place:
                    inside = f"{place}[]"
                pending.append((inside, inner, not is_by_name and key == "properties"))


def _divisor(value: float) -> tuple[int, int]:
    """Coefficient and exponent as the compiler computes them: coefficient / 10**exponent."""
    exponent = 0
    while value % 1:
        value, exponent = value * 10, exponent + 1
    coefficient = abs(int(value)) or 1
    while exponent and coefficient % 10 == 0:
        coefficient, exponent = coefficient // 10, exponent - 1
    return coefficient, exponent


def _common_multiple(values: set[float]) -> int:
    """The least common multiple, or any number too large for the compiler."""
    divisors = [*map(_divisor, values)]
    most = max((exponent for _, exponent in divisors), default=0)
    multiple = 1
    for coefficient, exponent in divisors:
        multiple = math.lcm(multiple, coefficient * 10 ** (most - exponent))
        if multiple > _MAX_DIVISOR:
            break
    return multiple
