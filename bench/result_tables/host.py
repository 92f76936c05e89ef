"""Tables of what a CPU does: the gateway, faults by the thousand, memory over time."""

from __future__ import annotations

from typing import Any

from .results import figure_table, figures, load, number, source, table


def cpu(family: str) -> str:
    """One family of cpu.json."""
    return figure_table(figures("cpu", family).values())


def front() -> str:
    """The gateway's fronts, all families."""
    found = load("front")["figures"]
    return figure_table(f for family in found.values() for f in family) + "\n" + source("front")


def texts() -> str:
    """What the largest texts cost running streams."""
    return figure_table(figures("texts", "texts").values()) + "\n" + source("texts")


def speculation() -> str:
    """N-grams on the bundled model."""
    return figure_table(figures("speculation").values()) + "\n" + source("speculation")


def speculation_gpu() -> str:
    """Drafts that a coin accepts, on an H200 and an H100."""
    return _each("speculation_gpu", "speculation_gpu_h100")


def _each(*names: str) -> str:
    """A table for each of these files."""
    return "\n".join(figure_table(figures(name).values()) + "\n" + source(name) for name in names)


def lora() -> str:
    """What LoRA adapters cost steps, on an H200 and an H100."""
    return _each("lora", "lora_h100")


def chats() -> str:
    """Chats of several turns, by mode: of the 8B shape and of 30B-A3B."""
    return _each("chats", "chats_30b-a3b")


def callers() -> str:
    """A light caller beside bulk callers."""
    return figure_table(figures("callers").values()) + "\n" + source("callers")


def simulated_goodput() -> str:
    """Ways to use some cards, over steps that are played: a row for the same requests."""
    found = load("simulated_goodput")
    points: dict[tuple[object, ...], dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        key = (row["requests"], row["y_ms"], row["rate_per_s"], row["cards"], row["gateways"])
        points.setdefault(key, {})[row["mode"]] = row
    rows = []
    for (requests, y_ms, rate, cards, gateways), modes in points.items():
        auto, aggregated, split = (modes[m] for m in ("auto", "aggregated", "disaggregated"))
        rows.append(
            (
                f"{requests}, {y_ms:g} ms, {rate:g}/s",
                f"{cards}, {gateways}",
                *(f"{mode['good_share']:.2f}" for mode in (auto, aggregated)),
                f"{split['good_share']:.2f} ({split['prefill_cards']})",
                f"{auto['good_share'] - max(aggregated['good_share'], split['good_share']):+.2f}",
                f"{auto['ttft_p50_ms']:.0f} / {auto['ttft_p90_ms']:.0f}",
                f"{auto['tbt_p50_ms']:.1f} / {auto['tbt_p99_ms']:.1f}",
            )
        )
    head = (
        *("in/out, Y, rate that counts", "cards, gateways", "auto good", "aggregated"),
        *("best split (prefill cards)", "auto less the better", "auto's TTFT p50 / p90, ms"),
        "auto's TBT p50 / p99, ms",
    )
    return table(head, rows) + "\n" + source("simulated_goodput")


def beam_blocks() -> str:
    """What beams share, and what a step of a search copies."""
    rows = [
        (
            f"{row['prompt_tokens']} + {row['output_tokens']}",
            str(row["width"]),
            f"{row['saved']:.1%}",
            number(row["copied_per_step"]),
            number(row["copied_without_sharing_per_step"]),
        )
        for row in load("beam_blocks")["rows"]
    ]
    head = (
        *("prompt + output tokens", "beams", "blocks saved", "blocks copied a step"),
        "without sharing",
    )
    return table(head, rows) + "\n" + source("beam_blocks")


def index() -> str:
    """The prefix index."""
    return figure_table(figures("index", "index").values()) + "\n" + source("index")


def prefix() -> str:
    """A trace through caches and routing, over steps that are played."""
    rows = [
        (
            f"{row['num_engines']}",
            row["policy"].replace("_", " "),
            f"{row['pool_tokens'] / 1e6:.2f} + {row['host_tokens'] / 1e6:.1f}",
            f"{100 * row['hit_rate']:.1f}",
            f"{100 * row['oracle_hit_rate']:.1f}",
            f"{100 * row['busy']:.0f}",
            f"{row['ttft_mean_s']:.2f}",
            f"{row['ttft_p50_s']:.2f} / {row['ttft_p99_s']:.1f}",
            f"{row['fetches']:,}",
        )
        for row in load("prefix")["rows"]
    ]
    head = (
        *("engines", "policy", "M tokens each, pool + host", "hits, %", "one pool of all, %"),
        *("busy, %", "mean TTFT, s", "p50 / p99", "fetches"),
    )
    return table(head, rows) + "\n" + source("prefix")


def quality() -> str:
    """Perplexity of the bundled model with its weights quantised."""
    found = figures("quality", "perplexity")
    rows = [
        (name, f"{f['median']:.3f}", f"{f['target'] or f['median']:.3f}")
        for name, f in found.items()
    ]
    return table(("", "perplexity", "at most"), rows) + "\n" + source("quality")


def soak() -> str:
    """Memory of each process under steady load."""
    found = load("soak")
    rows = [
        (
            name,
            number(process["first_mb"]),
            number(process["last_mb"]),
            f"{process['mb_per_min_after_warmup']:.3f}",
        )
        for name, process in found["processes"].items()
    ]
    wanted = f"{found['minutes']:.0f} minutes, {sum(found['requests'].values()):,} requests"
    head = (wanted, "first MB", "last MB", f"MB/min, {found['target_mb_per_min']} allowed")
    return table(head, rows) + "\n" + source("soak")


def strangers() -> str:
    """What connections that prove nothing cost an engine."""
    found = load("strangers")
    rows = [
        (door, number(seen["alone_percent"], "%"), number(seen["strangers_percent"], "%"))
        for door, seen in found["doors"].items()
    ]
    head = ("socket", "engine's core, alone", f"with {found['per_s']} connections a second")
    return table(head, rows) + "\n" + source("strangers")


def fault_sweep() -> str:
    """Thousands of streams on a cluster that breaks all the time."""
    found = load("fault_sweep")
    rows = [
        ("streams", number(found["streams"])),
        ("hit by a fault, that is, dispatched again", number(found["streams_hit"])),
        ("near-ties", number(found["near_ties"])),
        *((f"fault: {name}", number(count)) for name, count in found["faults"].items()),
    ]
    for name in ("hit", "not hit"):
        times, gaps = found["ttft_s"][name], found["longest_gap_s"][name]
        rows.append((f"TTFT p50 / p99, {name}", f"{times['p50']:.2f} / {times['p99']:.2f} s"))
        rows.append((f"longest gap p50 / p99, {name}", f"{gaps['p50']:.2f} / {gaps['p99']:.2f} s"))
    return table(("", ""), rows) + "\n" + source("fault_sweep", command="make fault-sweep")
