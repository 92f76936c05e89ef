"""The schemes of serving beside each other: tables, and the pictures of docs/why.md."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .results import RESULTS, load, number, source, table

_WIDTH, _LEFT, _ROW, _TOP = 640, 170, 24, 34
_GPU = "baselines_gpu"
_COLOUR = "#1f5fa8"


def schemes(name: str = "baselines") -> str:
    """A row for each scheme of one engine."""
    found = load(name)
    rows = [
        (
            row["name"],
            number(row["requests_per_s"]),
            number(row["mean_running"]),
            f"{100 * row['waste']:.1f} %",
            *_latencies(row),
        )
        for row in _of_one(found)
    ]
    head = ("", "requests/s", "run at once", "memory wasted", "TTFT p50 / p99", "TBT p50 / p99")
    return f"{table(head, rows)}\n{_setting(found)}\n{source(name)}"


def pairs(name: str = "baselines") -> str:
    """A row for each way to use two engines."""
    found = load(name)
    rows = [
        (row["name"], number(row["requests_per_s"]), *_latencies(row))
        for row in found["schemes"]
        if "num_engines" in row
    ]
    head = ("", "requests/s of each", "TTFT p50 / p99", "TBT p50 / p99")
    setting = (
        f"Requests as above, twice as many for two engines, TTFT and TBT at "
        f"{2 * found['rate_per_s']:.3g} a second; promised is a TBT of {found['tbt_ms']} ms.\n"
    )
    return f"{table(head, rows)}\n{setting}\n{source(name)}"


def on_gpu() -> str:
    """Both for a GPU, once they were measured."""
    if not (RESULTS / f"{_GPU}.json").exists():
        return "`python -m baton.bench.baselines --gpu` makes this table where there is a GPU.\n"
    return f"{schemes(_GPU)}\n{pairs(_GPU)}"


def _of_one(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in found["schemes"] if "num_engines" not in row]


def _latencies(row: dict[str, Any]) -> tuple[str, str]:
    return (
        _ms(row["ttft_p50_s"], row["ttft_p99_s"]),
        _ms(row["tbt_p50_s"], row["tbt_p99_s"]),
    )


def admissions() -> str:
    """Whom to admit."""
    rows = [
        (
            row["name"],
            number(row["requests_per_s"]),
            number(row["mean_running"]),
            str(row["preemptions"]),
        )
        for row in load("baselines")["admissions"]
    ]
    head = ("admitted by", "requests/s", "run at once", "preemptions")
    chats = load("baselines")["chats"]
    setting = (
        f"Prompts of {chats['mean_prompt']:.0f} and outputs of {chats['mean_output']:.0f} tokens "
        f"on average, all there at once, over a pool of {chats['pool_tokens']} tokens.\n"
    )
    return f"{table(head, rows)}\n{setting}\n{source('baselines')}"


def _ms(p50_s: float, p99_s: float) -> str:
    return f"{number(1e3 * p50_s)} / {number(1e3 * p99_s)} ms"


def _setting(found: dict[str, Any]) -> str:
    shape = found["shape"]
    return (
        f"`{found['model']}`, {shape['num_requests']} requests, prompts of "
        f"{found['mean_prompt']:.0f} and outputs of {found['mean_output']:.0f} tokens on average, "
        f"a pool of {found['pool_tokens']} tokens; TTFT and TBT at {found['rate_per_s']:.3g} "
        f"requests/s. Times are {found['clock']}.\n"
    )


def memory_picture() -> str:
    """What share of the memory set aside holds nothing."""
    rows = [(row["name"], 100 * row["waste"]) for row in _of_one(load("baselines"))]
    return _bars("KV memory that is set aside and holds nothing, %", rows)


def throughput_picture() -> str:
    """All requests at once."""
    rows = [(row["name"], row["requests_per_s"]) for row in _of_one(load("baselines"))]
    return _bars("requests/s, all there at once", rows)


def gaps_picture() -> str:
    """What a running request waits for at worst."""
    rows = [(row["name"], 1e3 * row["tbt_p99_s"]) for row in _of_one(load("baselines"))]
    return _bars("TBT p99, ms, at the same rate of arrivals", rows)


def pairs_picture() -> str:
    """The same on two engines."""
    found = load("baselines")["schemes"]
    rows = [(row["name"], 1e3 * row["tbt_p99_s"]) for row in found if "num_engines" in row]
    return _bars("TBT p99, ms, on two engines", rows)


def _bars(title: str, rows: Sequence[tuple[str, float]]) -> str:
    """An SVG of one bar a row."""
    height = _TOP + _ROW * len(rows) + 8
    scale = (_WIDTH - _LEFT - 60) / max(value for _, value in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="13" font-weight="bold">{escape(title)}</text>',
    ]
    for index, (name, value) in enumerate(rows):
        y, width = _TOP + _ROW * index, scale * value
        parts += [
            f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LEFT}" y="{y + 3}" width="{width:.1f}" height="16" fill="{_COLOUR}"/>',
            f'<text x="{_LEFT + width + 6:.1f}" y="{y + 15}">{number(value)}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])
