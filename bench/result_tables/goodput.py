"""Tables of the rates that keep their targets, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..goodput.figures import KEPT_SHARE, goodput
from ..serve.clients.arrivals import BACKGROUND
from ..serve.clients.workloads import PROBE
from .results import RESULTS, Row, load, number, table

_NAME = "goodput"
_SHAREGPT = "sharegpt_"
_RATE = "rate/s (came)"
_SUMMARY_Y = "25"
_VLLM = "vLLM 0.26, chunks of 512"


def highest() -> str:
    """By cards, requests and mode: the highest rate that is kept, for each Y."""
    ys = _ys()
    kinds = sorted({_kind(row) for row in _rows()}, key=_order)
    rows: list[Row] = []
    for kind in kinds:
        of_kind = [row for row in _rows() if _kind(row) == kind]
        if len({row["rate_per_s"] for row in of_kind}) > 1:
            rows.append((*kind, *(_goodput(of_kind, y) for y in ys)))
    head = ("cards", "in/out", "mode", *(f"Y {y} ms" for y in ys))
    return table(head, rows)


def _goodput(of_kind: list[dict[str, Any]], y: str) -> str:
    """Where requests ask for a Y, of those that asked for this one."""
    points = {
        row["rate_per_s"]: row["attained"][y]
        for row in of_kind
        if y in row["attained"] and row["y_ms"] in (None, float(y))
    }
    if not points:
        return ""
    kept, crossed = goodput(points)
    if not kept:
        return f"< {min(points):g}"
    return f"{kept:g} ({crossed:.2f})" if crossed > kept else f">= {kept:g}"


def summary() -> str:
    """On H200s, at the highest rate of each load that was kept, where as many requests came in each
    mode: their good ones. Of a mode that was not run there, those at the highest rate that it kept,
    or that was tried."""
    shares: dict[tuple[str, str, float, str], dict[str, float]] = {}
    highest: dict[tuple[str, str, str], tuple[bool, float, float]] = {}  # whether kept, rate, share
    came: dict[tuple[str, str, float, str], list[int]] = {}
    for row in _rows():
        share = row["attained"].get(_SUMMARY_Y)
        if share is None or "H200" not in row["cards"] or BACKGROUND in row["groups"]:
            continue
        mode, gateways = _summary_mode(row["mode"])
        if row["y_ms"] in (None, float(_SUMMARY_Y)) and gateways.isdecimal():
            place = row["cards"], row["cell"], row["rate_per_s"], gateways
            by_mode = shares.setdefault(place, {})
            by_mode[mode] = max(share, by_mode.get(mode, 0.0))  # of splits, the best
            found = (share >= KEPT_SHARE, place[2], share)
            highest[*place[:2], mode] = max(found, highest.get((*place[:2], mode), found))
            came.setdefault(place, []).append(row["num_counted"])
    kept = [
        place
        for place, by_mode in shares.items()
        if max(by_mode.values()) >= KEPT_SHARE and min(came[place]) >= 0.95 * max(came[place])
    ]
    kept.sort(key=lambda place: (*place[:3], len(shares[place])))
    modes = ("auto", "aggregated", "disaggregated", _VLLM)
    rows = []
    for place in {place[:2]: place for place in kept}.values():
        cells = []
        for mode in modes:
            _, rate, share = highest.get((*place[:2], mode), (False, 0.0, 0.0))
            if mode in shares[place]:
                cells.append(f"{100 * shares[place][mode]:.0f} %")
            else:
                cells.append(f"{100 * share:.0f} % at {rate:g}" if rate else "")
        rows.append((*place[:2], f"{place[2]:g}", place[3], *cells))
    return table(("cards", "in/out", "requests/s", "gateways", *modes), rows)


def _summary_mode(mode: str) -> tuple[str, str]:
    """Of `auto, 2 gateways`, `2+2, 4 gateways` or `vllm-512`, the mode and how many gateways: no
    number, where there is more."""
    name, *others = mode.split(", ")
    gateways = ", ".join(others).removesuffix(" gateways") if others else "1"
    if name == "vllm-512":
        return _VLLM, gateways
    return "disaggregated" if "+" in name else name, gateways


def by_rate() -> str:
    """Every run."""
    ys = _ys()
    rows = []
    for row in sorted(_rows(), key=_place):
        groups, asked = row["groups"], row["y_ms"]
        probe = groups[PROBE]
        streams = groups.get(BACKGROUND, probe)
        errors = row["step_cost_error"].values()
        rows.append(
            (
                *(*_kind(row), "" if asked is None else f"{asked:g}", _rate(row)),
                " ".join(f"{row['attained'][y]:.2f}" if y in row["attained"] else "-" for y in ys),
                " / ".join(number(probe["ttft_ms"][q]) for q in ("p50", "p90", "p99")),
                number(streams["tpot_ms"]["p50"]),
                number(streams["tbt_ms"]["p99"]),
                f"{max(errors):.2f}" if errors else "",
                _clocks(row),
            )
        )
    head = (
        *("cards", "in/out", "mode", "Y asked, ms", _RATE, f"good for {', '.join(ys)} ms"),
        *("TTFT p50 / p90 / p99, ms", "TPOT p50, ms", "TBT p99, ms", "error of a step p90"),
        "SM clocks, MHz",
    )
    return table(head, rows) + "\n" + _source()


def sharegpt() -> str:
    """Every file of ShareGPT's lengths, by the model that it is named after."""
    rows: list[Row] = []
    sources: list[str] = []
    for path in sorted(RESULTS.glob(f"{_SHAREGPT}*.json")):
        found = load(path.stem)
        for row in sorted(found["rows"], key=lambda row: (row["mode"], row["rate_per_s"])):
            probe = row["groups"][PROBE]
            rows.append(
                (
                    *(path.stem.removeprefix(_SHAREGPT), _cards(row, found), row["mode"]),
                    _rate(row),
                    number(row["normalised_latency_ms"]),
                    *(
                        " / ".join(number(probe[key][q]) for q in ("p50", "p90"))
                        for key in ("ttft_ms", "tpot_ms")
                    ),
                    " ".join(f"{y} ms: {share:.2f}" for y, share in row["attained"].items()),
                )
            )
        sources += [
            f"[{path.name}]({{results}}/{path.name}), {call['commit']}, {call['date']}, "
            f"`{call['command']}`\n"
            for call in found["calls"]
        ]
    head = (
        *("model", "cards", "mode", _RATE, "normalised latency, ms/token"),
        *("TTFT p50 / p90, ms", "TPOT p50 / p90, ms", "good for Y"),
    )
    return "\n".join([table(head, rows), *sources]) if rows else "Not measured yet.\n"


def _clocks(row: dict[str, Any]) -> str:
    """Of its cards, their medians: at a card's limit of power they are below what it is sold for,
    and differ by card."""
    return " ".join(f"{each['clock_mhz']:.0f}" for each in row.get("clocks", {}).values())


def _rate(row: dict[str, Any]) -> str:
    """What was asked for, and how many a second came by chance among those that count."""
    begin_s, end_s = row["window_s"]
    return f"{row['rate_per_s']:g} ({row['num_counted'] / (end_s - begin_s):.3g})"


def _rows() -> list[dict[str, Any]]:
    """Of every file; those of `goodput_MODEL.json` have the model in front of their cell."""
    rows = []
    for name in _files():
        found, model = load(name), name.removeprefix(_NAME).removeprefix("_")
        for row in found["rows"]:
            cell = f"{model} {row['cell']}".strip()
            rows.append(row | {"cards": _cards(row, found), "cell": cell})
    return rows


def _files() -> list[str]:
    return sorted(path.stem for path in RESULTS.glob(f"{_NAME}*.json"))


def _cards(row: dict[str, Any], found: dict[str, Any]) -> str:
    return f"{row['num_cards']} x {found['calls'][row['call']]['machine']['cards']}"


def _kind(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["cards"], row["cell"], row["mode"]


def _order(kind: tuple[str, str, str]) -> tuple[str, str, bool, str]:
    cards, cell, mode = kind
    return cards, cell, mode.startswith("vllm"), mode


def _place(row: dict[str, Any]) -> tuple[object, ...]:
    return _order(_kind(row)), row["y_ms"] or 0.0, row["rate_per_s"]


def _ys() -> list[str]:
    return sorted({y for row in _rows() for y in row["attained"]}, key=float)


def _source() -> str:
    """The calls that some row comes from."""
    return "".join(_lines())


def _lines() -> Iterator[str]:
    for name in _files():
        found = load(name)
        for number_ in sorted({row["call"] for row in found["rows"]}):
            call = found["calls"][number_]
            yield (
                f"[{name}.json]({{results}}/{name}.json), {call['commit']}, {call['date']}, "
                f"`{call['command']}`\n\n"
            )
