"""Tables of whole systems on GPUs, as their clients saw them."""

from __future__ import annotations

import statistics
from typing import Any

from .results import Row, figure_table, figures, load, number, pair, source, table

_LENGTHS = {"1k": "1024", "8k": "8192", "32k": "32768"}


def moves() -> str:
    """What a client sees of a running request that moves."""
    return figure_table(figures("moves").values()) + "\n" + source("moves")


def idle() -> str:
    """One request at a time: what the system adds to its engines."""
    found, nixl = load("serve")["idle"], load("copied_by_hand")["vllm"]["nixl_added_ms"]
    rows = []
    for title, length in _LENGTHS.items():
        one = found[length]
        rows.append(
            (
                title,
                number(one["engine_ttft_ms"]),
                number(one["ttft_ms"]),
                f"{one['ttft_added_ms']:+.1f}",
                f"{one['outside_prefill_ms']:.1f}",
                f"{one['gap_over_step_ms']:.1f}",
                f"{one['stages_ms']['first_token to transfer_ended']:.2f}",
                f"+{nixl[length]:.0f}",
            )
        )
    head = (
        *("prompt, ms", "engine alone", "TTFT", "added", "outside the prefill's steps"),
        *("first gap - one step", "first token to KV in place", "vLLM + NIXL, added [^hand]"),
    )
    return table(head, rows)


def load_rows() -> str:
    """64 streams, then prompts of 8192 tokens among them; other ways of using two GPUs."""
    serve = load("serve")
    earlier, before, short = serve["earlier"]["runs"], serve["f1404a7"], serve["46071e66"]
    rows = [
        _load_row("streams alone", serve["streams"]),
        _load_row("with 8k prompts", serve["streams+8k"]),
        _load_row("the same at f1404a7", before["streams+8k"]),
        _load_row("one caller, at 46071e66: streams alone", short["streams"]),
        _load_row("one caller, at 46071e66: with 8k prompts", short["streams+8k"]),
        _load_row("both roles on each GPU: streams alone", earlier["mixed streams"]),
        _load_row("both roles on each GPU: with 8k prompts", earlier["mixed streams+8k"]),
    ]
    rows += [
        (
            *(f"{one['name']} [^hand]", f"{one['window_s']} s", f"/ {number(one['tbt_p99_ms'])}"),
            *(pair(*one["ttft_ms"]), "", "", ""),
        )
        for one in load("copied_by_hand")["vllm"]["loads"]
    ]
    head = (
        *("64 streams, 8k prompts at 3.7/s", "measured for", "TBT p50 / p99, ms"),
        *("TTFT p50 / p99, ms", "FIFO replay, ms", "hand-off gap p50, ms", "tokens/s"),
    )
    return table(head, rows)


def four_gpus() -> str:
    """Two engines of each role."""
    serve = load("serve")
    rows = []
    for cards in ("H200", "H100"):
        for one in serve[f"2+2 {cards}"]:
            title = f"{cards}s, {one['callers']}"
            rows.append(_load_row(f"{title}, streams alone", one["streams alone"]))
            rows.append(_load_row(f"{title}, with 8k prompts, {one['commit']}", one["streams+8k"]))
    head = (
        *("128 streams, 8k prompts at 7.4/s", "measured for", "TBT p50 / p99, ms"),
        *("TTFT p50 / p99, ms", "FIFO replay, ms", "hand-off gap p50, ms", "tokens/s"),
    )
    return table(head, rows)


def mixture_on_four() -> str:
    """A mixture's experts whole on each side's two ranks: one request at a time."""
    rows = [
        (
            f"{int(length):,}",
            number(one["ttft_ms"]),
            number(one["prefill_ms"]),
            f"{one['outside_prefill_ms']:.1f}",
            f"{one['stages_ms']['first_token to transfer_ended']:.2f}",
            number(one["decode_step_ms"]),
            f"{one['gap_over_step_ms']:.1f}",
        )
        for length, one in load("serve_30b-a3b")["idle"].items()
    ]
    head = (
        *("prompt, ms", "TTFT", "prefill's steps", "outside them", "first token to KV in place"),
        *("decode step", "first gap - one step"),
    )
    return table(head, rows) + "\n" + source("serve_30b-a3b")


def _load_row(title: str, run: dict[str, Any]) -> Row:
    """TBT of the streams that run all the time, TTFT and gap of the prompts among them."""
    groups = run["groups"]
    streams, prompts = groups["background"], groups.get("probe")
    tokens = sum(group["tokens_per_s"] for group in groups.values())
    seconds = run["window_s"][1] - run["window_s"][0]
    tbt = _spread(streams["tbt_ms"])
    if prompts is None:
        return (title, f"{seconds:.0f} s", tbt, "", "", "", number(tokens))
    floor = prompts.get("ttft_fifo_floor_ms")  # where the prompts were computed alone, too
    return (
        *(title, f"{seconds:.0f} s", tbt, _spread(prompts["ttft_ms"])),
        "" if floor is None else _spread(floor),
        number(prompts["handoff_gap_ms"]["p50"]),
        number(tokens),
    )


def _spread(values: dict[str, float]) -> str:
    return pair(values["p50"], values["p99"])


def two_prefill() -> str:
    """How prompts are dealt to two prefill engines."""
    serve = load("serve")
    now, before = serve["2 prefill streams+8k"], serve["2 prefill at 131eb65"]["streams+8k"]
    probe, old = now["groups"]["probe"], before["groups"]["probe"]
    floor = probe["ttft_fifo_floor_ms"]
    spacing = statistics.median(serve["2 prefill alone queued"]) * 1e3
    old_spacing = statistics.median(serve["2 prefill at 131eb65"]["alone queued"]) * 1e3
    rows = [
        (
            "a last chunk of 2048 tokens for prompts without others behind them (131eb65)",
            *(_spread(old["ttft_ms"]), "", number(old_spacing)),
        ),
        (
            "prompts of a queue computed whole (817abc2)",
            *(_spread(probe["ttft_ms"]), _spread(floor), number(spacing)),
        ),
    ]
    head = (
        *("8k prompts at 7.4/s, 65 s", "TTFT p50 / p99, ms"),
        *("FIFO replay, ms", "a prompt behind another at an engine alone, ms"),
    )
    return table(head, rows)


def overload() -> str:
    """More requests than a decode engine can take."""
    rows = []
    for title, name in (("two H200s", "overload"), ("both roles on one", "overload_one_card")):
        run = load(name)
        probe = run["groups"]["probe"]
        seconds = run["window_s"][1] - run["window_s"][0]
        rows.append(
            (
                f"{title}, [{name}.json]({{results}}/{name}.json), {run['commit']}",
                f"{probe['num_sent'] / seconds:.0f}/s for {seconds:.0f} s",
                f"{probe['num_failed']} of {number(probe['num_sent'])}",
                f"{probe['handoff_gap_ms']['p50']:.0f} / {probe['handoff_gap_ms']['p99.9']:.0f}",
                _spread(probe["tbt_ms"]),
                _spread(probe["ttft_ms"]),
            )
        )
    head = (
        *("1024 tokens in, 512 out", "load", "failed", "hand-off gap p50 / p99.9, ms"),
        *("TBT p50 / p99, ms", "TTFT p50 / p99, ms"),
    )
    return table(head, rows)


def faults() -> str:
    """Faults on two GPUs."""
    found = load("serve")["faults"]
    run = found["mixed run"]
    rows = [
        ("requests", number(run["requests"])),
        ("killed during them", "; ".join(run["killed"])),
        ("finished with the tokens of one process", number(run["finished"])),
        ("cancelled by the test", number(run["cancelled"])),
        ("failed", number(run["failed"])),
        ("TTFT p99", number(run["ttft_p99_s"], "s")),
        ("longest gap between tokens", number(run["longest_gap_s"], "s")),
        ("`baton fsck` afterwards", run["fsck"]),
        ("a lease that expires during pulls", found["lease expired during pulls"]),
        ("the source dies during copies", found["death of the source during copies"]),
    ]
    return table(("", ""), rows)
