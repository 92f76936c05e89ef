"""What a request parameter can be: the kinds, and the `parameter` that makes a field one.

The table itself is SamplingParams and RequestOptions in request.py, one field a parameter, with
the name of the proto message's field. Made from it: the fields of HTTP bodies and OpenAPI
(gateway/http/generate/parameter_fields.py), the checks of both fronts (gateway/validation), the
codec (proto/codec.py), the steps between an engine's ranks, and the table in docs/sampling.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UINT32_MAX = 2**32 - 1  # the wire's


@dataclass(frozen=True, slots=True)
class Number:
    """A float in [least, most], or in (least, most] if `is_open`."""

    least: float
    most: float
    is_open: bool = False

    @property
    def range(self) -> str:
        return f"{'(' if self.is_open else '['}{self.least:g}, {self.most:g}]"


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer in [least, most]; a bound that is the wire's alone is not spoken of."""

    least: int = 0
    most: int = UINT32_MAX

    @property
    def range(self) -> str:
        return f"[{self.least}, {self.most}]" if self.most < UINT32_MAX else f"{self.least} ..."


@dataclass(frozen=True, slots=True)
class Seed(Integer):
    """An integer of 63 bits."""

    most: int = 2**63 - 1

    @property
    def range(self) -> str:
        return "[0, 2**63)"


@dataclass(frozen=True, slots=True)
class Count(Integer):
    """From `least` on; the validator says how many are too many."""


@dataclass(frozen=True, slots=True)
class Limit(Integer):
    """A count that may be unlimited: None here, 0 on the wire, 0 or -1 over HTTP."""


@dataclass(frozen=True, slots=True)
class Flag:
    range = ""


@dataclass(frozen=True, slots=True)
class Name:
    """A text that this pattern matches whole; `range` says so in words."""

    pattern: str
    range: str


@dataclass(frozen=True, slots=True)
class StopStrings:
    max_items: int
    max_bytes: int

    @property
    def range(self) -> str:
        return f"{self.max_items} strings of 1 to {self.max_bytes} bytes"


@dataclass(frozen=True, slots=True)
class TokenIds:
    max_items: int

    @property
    def range(self) -> str:
        return f"{self.max_items} ids"


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Pairs of a token id and a float in [-most, most]."""

    max_items: int
    most: float

    @property
    def range(self) -> str:
        return f"id -> [-{self.most:g}, {self.most:g}], at most {self.max_items}"


Kind = Number | Integer | Flag | Name | StopStrings | TokenIds | LogitBias


@dataclass(frozen=True, slots=True)
class Parameter:
    """`absent`: what an absent field means, in words, where that is not `default`.

    `over_http`: how HTTP bodies have it, in words, where not by the same name and meaning.
    """

    default: Any
    kind: Kind
    help: str
    absent: str | None = None
    over_http: str = ""


def parameter(default: Any, kind: Kind, help: str, **more: str) -> Any:
    """A dataclass field that is a request parameter; `more`: see Parameter."""
    described = Parameter(default, kind, help, **more)
    return dataclasses.field(default=default, metadata={"parameter": described})


def parameters_of(table: type) -> Mapping[str, Parameter]:
    """The parameters among the fields of a dataclass, by name."""
    return {
        field.name: field.metadata["parameter"]
        for field in dataclasses.fields(table)
        if "parameter" in field.metadata
    }
