"""The plan of a sweep: kinds of requests, the rates to try for each way to serve them, and the
expected durations. Pure.

A start brings up one system, which serves all its runs. The promise of an engine is the
largest Y of its start; each request carries its own Y, which is honoured down to half of the
engine's. Without a promise, one run of a rate shows how many requests keep each Y.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..serve.clients.workloads import LoadShape, Workload, make_workload

DISAGGREGATED, AGGREGATED, AUTO = "disaggregated", "aggregated", "auto"
MODES = (DISAGGREGATED, AGGREGATED, AUTO)
PROMISING = (AGGREGATED, AUTO)
VLLM = "vllm-"  # followed by the tokens per chunk
PREDICTED_CARDS = 2  # number of cards for the rates below
ANY_CELL = ""  # rates for cells without their own
_RUN_OVERHEAD_S = 5.0  # generators start, draw prompts and write their records
_TPOT_S = 0.02  # of requests without known times

# Requests per second by mode, then by Y in ms; 0 stands for any Y.
Rates = Mapping[str, Mapping[float, float]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of request. `lifetime_s`: duration of one request at a rate that is served well.

    `fixed_rate`: on two cards, for a cell that is measured at one rate and not at its highest;
    `predicted`: by simulation, on two H200s with the 8B shape.
    """

    name: str
    shape: LoadShape
    lifetime_s: float
    fixed_rate: float | None = None
    predicted: Rates | None = None
    mix: str = "poisson"

    def within(self, max_tokens: int | None) -> Cell:
        """The cell restricted to requests that fit a context of `max_tokens`; None: no limit."""
        if max_tokens is None:
            return self
        return replace(self, shape=replace(self.shape, max_tokens=max_tokens))

    def predicted_rate(self, mode: str, y_ms: float | None) -> float:
        """The rate predicted for two cards. Raises ValueError if the cell has no predictions for
        the mode."""
        of_mode = (self.predicted or {}).get(mode)
        if not of_mode:
            raise ValueError(f"no rates are predicted for {self.name}, {mode}: give --rates")
        if y_ms is None:
            return sum(of_mode.values()) / len(of_mode)
        return of_mode[min(of_mode, key=lambda known_ms: abs(known_ms - y_ms))]


def _cell(num_prompt: int, num_output: int, lifetime_s: float, **more: object) -> Cell:
    shape = LoadShape(num_prompt_tokens=num_prompt, num_output_tokens=num_output, num_streams=0)
    return Cell(f"{num_prompt}/{num_output}", shape, lifetime_s, **more)  # type: ignore[arg-type]


CELLS = {
    cell.name: cell
    for cell in (
        _cell(
            *(8192, 256, 3.0),
            predicted={
                DISAGGREGATED: {0: 3.1},
                AGGREGATED: {15: 4.6, 25: 5.5, 50: 6.2},
                AUTO: {15: 5.5, 25: 5.8, 50: 6.2},
                f"{VLLM}256": {0: 3.0},
                f"{VLLM}512": {0: 4.0},
                f"{VLLM}1024": {0: 4.7},
            },
        ),
        _cell(
            *(1024, 512, 10.0),
            predicted={
                DISAGGREGATED: {15: 24, 25: 28, 50: 32},
                AGGREGATED: {15: 32, 25: 34, 50: 38},
                AUTO: {15: 32, 25: 34, 50: 38},
                f"{VLLM}256": {0: 24},
                f"{VLLM}512": {0: 28},
                f"{VLLM}1024": {0: 30},
            },
        ),
        _cell(256, 1024, 10.0, fixed_rate=16.0),
        Cell("streams+8k", LoadShape(num_streams=64), 3.0, fixed_rate=3.7, mix="streams+8k"),
    )
}


SHAREGPT = Cell("sharegpt", LoadShape(num_streams=0), 10.0, mix="sharegpt")


def cell_named(name: str) -> Cell:
    """The cell of this name: one of CELLS, SHAREGPT, or IN/OUT of any lengths. Raises
    ValueError."""
    if name in CELLS:
        return CELLS[name]
    if name == SHAREGPT.name:
        return SHAREGPT
    lengths = re.fullmatch(r"(\d+)/(\d+)", name)
    if lengths is None:
        raise ValueError(f"no cell {name!r}; there are {', '.join(CELLS)}, sharegpt and IN/OUT")
    num_prompt, num_output = map(int, lengths.groups())
    return _cell(num_prompt, num_output, 1.0 + num_output * _TPOT_S)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a rate is sent: warm-up for `warm_lifetimes` lifetimes of a request, then `count_s`
    seconds that count, then one more lifetime, so that the last counted requests end under the same
    load."""

    count_s: float = 60.0
    warm_lifetimes: float = 2.0


@dataclass(frozen=True, slots=True)
class Run:
    """A run at one rate. `y_ms`: the TBT target that its requests carry; None: no target."""

    cell: Cell
    rate_per_s: float
    y_ms: float | None
    timing: Timing
    num_cards: int

    @property
    def warmup_s(self) -> float:
        return self.timing.warm_lifetimes * self.cell.lifetime_s

    @property
    def drain_s(self) -> float:
        return self.cell.lifetime_s

    @property
    def most_s(self) -> float:
        """The longest time from begin to end, if each request takes its full lifetime."""
        return _RUN_OVERHEAD_S + self._sending_s + self.drain_s

    @property
    def _sending_s(self) -> float:
        return self.warmup_s + self.timing.count_s + self.cell.lifetime_s

    def workload(self) -> Workload:
        """Requests of all modes and Ys have the same arrival times and lengths, but different
        tokens, so that a system never gets a prompt twice and has none cached."""
        num_streams = self.cell.shape.num_streams * self.num_cards // PREDICTED_CARDS
        shape = replace(
            self.cell.shape,
            rate_per_s=self.rate_per_s,
            duration_s=self._sending_s,
            num_streams=num_streams,
            seed=zlib.crc32(f"{self.cell.name} {self.rate_per_s:g}".encode()),
        )
        workload = make_workload(self.cell.mix, shape)
        of_y = zlib.crc32(str(self.y_ms).encode())
        arrivals = tuple(
            replace(
                one, prompt=replace(one.prompt, seeds=tuple(s ^ of_y for s in one.prompt.seeds))
            )
            for one in workload.arrivals
        )
        return replace(workload, warmup_s=self.warmup_s, arrivals=arrivals)


@dataclass(frozen=True, slots=True)
class Start:
    """A system that is brought up once. `promise_ms`: the promise of its engines, the largest Y of
    its runs."""

    mode: str
    promise_ms: float | None
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return self.mode if self.promise_ms is None else f"{self.mode} for {self.promise_ms:g} ms"


def rates_by_cell(texts: Sequence[str]) -> Mapping[str, Sequence[float]]:
    """Parse `RATE` and `CELL=RATE`. Raises ValueError."""
    found: dict[str, list[float]] = {}
    for text in texts:
        cell, _, rate = text.rpartition("=")
        found.setdefault(cell, []).append(float(rate))
    return found


def split_of(mode: str) -> tuple[int, int] | None:
    """The numbers of prefill and decode engines of a mode P+D; None for another mode."""
    found = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", mode)
    return (int(found[1]), int(found[2])) if found else None


def promise_groups(ys_ms: Sequence[float]) -> list[list[float]]:
    """Groups of Ys that one start can serve, the largest first."""
    groups: list[list[float]] = []
    for y_ms in sorted(set(ys_ms), reverse=True):
        if groups and y_ms >= groups[-1][0] / 2:
            groups[-1].append(y_ms)
        else:
            groups.append([y_ms])
    return groups


def plan(
    modes: Sequence[str],
    cells: Sequence[Cell],
    ys_ms: Sequence[float],
    rates: Mapping[str, Sequence[float]],
    factors: Sequence[float],
    timing: Timing,
    num_cards: int,
    most_engines: int | None = None,
) -> Iterator[Start]:
    """All starts, one after the other. `rates` of a cell, or of ANY_CELL, replace the predicted
    rates times `factors`; rates ascend. Raises ValueError if a cell has neither, or if a mode needs
    more than `most_engines`."""

    def rates_of(cell: Cell, mode: str, y_ms: float | None) -> Sequence[float]:
        if given := rates.get(cell.name) or rates.get(ANY_CELL):
            return sorted(given)
        share = num_cards / PREDICTED_CARDS
        if cell.fixed_rate is not None:
            return [cell.fixed_rate * share]
        predicted = cell.predicted_rate(mode, y_ms) * share
        return [round(predicted * factor, 2) for factor in sorted(factors)]

    for mode in modes:
        if most_engines is not None and sum(split_of(mode) or ()) > most_engines:
            raise ValueError(f"{mode} takes more engines than there are: {most_engines}")
        groups = promise_groups(ys_ms) if mode in PROMISING else [[None]]
        for group in groups:
            runs = tuple(
                Run(cell, rate, y_ms, timing, num_cards)
                for cell in cells
                for y_ms in group
                for rate in rates_of(cell, mode, y_ms)
            )
            yield Start(mode, group[0], runs)
