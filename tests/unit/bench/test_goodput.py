"""Which requests are good, which count, which rate is kept; the plan of starts and runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from baton.bench.floors.gpu_shapes import Shape
from baton.bench.goodput import cells, figures
from baton.bench.goodput.__main__ import label, main, without_measured, write_model
from baton.bench.goodput.cells import (
    ANY_CELL,
    CELLS,
    Start,
    Timing,
    cell_named,
    plan,
    promise_groups,
    rates_by_cell,
    split_of,
)
from baton.bench.goodput.results import Results, key_of
from baton.bench.serve.clients.arrivals import BACKGROUND
from baton.bench.serve.clients.workloads import PROBE
from baton.core.config import GatewayConfig
from baton.gateway.validation.served_model import ServedModel
from baton.loadgen.figures import ReportWindow
from baton.loadgen.records import Record

TIMING = Timing(count_s=60.0, warm_lifetimes=2.0)


def record(ttft_s: float, gaps_s: list[float], due_s: float = 0.0, **more: object) -> Record:
    """A request whose tokens have all arrived."""
    at_s = [due_s + ttft_s]
    for gap_s in gaps_s:
        at_s.append(at_s[-1] + gap_s)
    fields = {"group": PROBE, "sent_s": due_s, "token_s": at_s} | more
    return Record(due_s=due_s, num_prompt_tokens=8, num_output_tokens=len(at_s), **fields)  # type: ignore[arg-type]


def test_a_request_is_good_by_its_first_token_and_its_own_gaps() -> None:
    assert figures.is_good(record(1.0, [0.01] * 200), 0.015)
    assert not figures.is_good(record(1.01, [0.01] * 200), 0.015)
    # The 99th percentile of 200 gaps lets two be longer.
    assert figures.is_good(record(0.1, [0.01] * 198 + [0.3] * 2), 0.015)
    assert not figures.is_good(record(0.1, [0.01] * 197 + [0.3] * 3), 0.015)


def test_a_first_gap_above_four_times_y_is_not_good() -> None:
    assert figures.is_good(record(0.1, [0.060] + [0.01] * 200), 0.015)
    assert not figures.is_good(record(0.1, [0.061] + [0.01] * 200), 0.015)


def test_a_request_that_failed_or_did_not_end_is_not_good() -> None:
    assert figures.is_good(record(0.1, []), 0.015)
    assert not figures.is_good(record(0.1, [0.01], error="HTTP 503"), 0.015)
    assert not figures.is_good(record(0.1, [0.01], token_s=[]), 0.015)
    assert not figures.is_good(record(0.1, [0.01], token_s=[0.1]), 0.015)


def test_what_counts_was_due_in_the_window_and_is_no_stream_of_the_background() -> None:
    records = [record(0.1, [0.01], due_s) for due_s in (1.9, 2.0, 7.9, 8.0)]
    records.append(record(0.1, [0.01], 3.0, group=BACKGROUND))
    window = ReportWindow(2.0, 8.0)
    assert [one.due_s for one in figures.counted(records, window)] == [2.0, 7.9]
    summary = figures.summarise(records, window, [15.0, 5.0])
    assert summary["num_counted"] == 2
    assert summary["attained"] == {"15": 1.0, "5": 0.0}
    assert summary["lifetime_p50_s"] == pytest.approx(0.11)
    assert summary["normalised_latency_ms"] == pytest.approx(55), "of two tokens"


def test_sharegpts_turns_come_at_a_rate_and_fit() -> None:
    cell = cell_named("sharegpt").within(2048)
    (start,) = plan(["aggregated"], [cell], [50], {ANY_CELL: [4.0]}, [], TIMING, 1)
    (run,) = start.runs
    arrivals = run.workload().arrivals
    sizes = [(one.prompt.num_tokens, one.num_output_tokens) for one in arrivals]
    assert max(map(sum, sizes)) <= 2048 and len(set(sizes)) > 50
    assert len(arrivals) == pytest.approx(4.0 * arrivals[-1].at_s, rel=0.2)
    assert run.workload() == run.workload()


def test_goodput_is_the_highest_rate_with_all_below_it_kept() -> None:
    assert figures.goodput({3.0: 0.98, 4.0: 0.92, 5.0: 0.82}) == (4.0, pytest.approx(4.2))
    assert figures.goodput({3.0: 0.98, 4.0: 0.5, 5.0: 0.95})[0] == 3.0
    assert figures.goodput({3.0: 0.98, 4.0: 0.9}) == (4.0, 4.0)
    assert figures.goodput({3.0: 0.89}) == (0.0, 0.0)


def test_errors_of_predicted_steps_are_read_by_node() -> None:
    text = (
        "# HELP baton_engine_step_cost_error Of steps\n"
        'baton_engine_step_cost_error{role="decode",node="decode-0"} 0.031\n'
        'baton_engine_step_cost_error{node="prefill-0",role="prefill"} 0.2 1700000000\n'
        "baton_num_requests_running 3\n"
    )
    assert figures.step_cost_errors(text) == {"decode-0": 0.031, "prefill-0": 0.2}
    assert figures.step_cost_errors("") == {}


def test_the_share_of_kept_promises_is_that_between_two_looks() -> None:
    def look(promised: int, kept: int, node: str) -> str:
        labels = f'{{node="{node}",role="decode"}}'
        return (
            f"baton_promised_steps_total{labels} {promised}\n"
            f"baton_kept_steps_total{labels} {kept}\n"
        )

    before = look(100, 40, "a") + look(7, 7, "b")
    after = look(300, 238, "a") + look(7, 7, "b") + look(8, 4, "c")
    assert figures.kept_steps(before, after) == {"a": 0.99, "c": 0.5}
    assert figures.kept_steps("", "") == {}


def test_one_start_serves_every_y_down_to_half_of_its_largest() -> None:
    assert promise_groups([15, 50, 25]) == [[50, 25], [15]]
    assert promise_groups([15, 25]) == [[25, 15]]
    starts = list(plan(cells.MODES, [CELLS["8192/256"]], [15, 25, 50], {}, [0.9, 1], TIMING, 2))
    assert [(start.mode, start.promise_ms, len(start.runs)) for start in starts] == [
        ("disaggregated", None, 2),  # its runs show how many requests keep each Y
        *((mode, y, n) for mode in ("aggregated", "auto") for y, n in ((50, 4), (15, 2))),
    ]
    assert [run.rate_per_s for run in starts[0].runs] == [2.79, 3.1]


def test_predicted_rates_are_those_of_two_cards() -> None:
    (start,) = plan(["aggregated"], list(CELLS.values()), [25], {}, [1], TIMING, 1)
    assert [run.rate_per_s for run in start.runs] == [2.75, 17, 8, 1.85]
    background = start.runs[-1].workload().background
    assert background is not None and background.num_streams == 32
    with pytest.raises(ValueError, match="give --rates"):
        list(plan(["auto"], [cell_named("64/16")], [25], {}, [1], TIMING, 1))
    with pytest.raises(ValueError, match="no cell"):
        cell_named("long")


def test_rates_are_of_one_cell_or_of_all_others() -> None:
    rates = rates_by_cell(["8192/256=4.5", "3", "8192/256=4"])
    (start,) = plan(
        ["auto"], [cell_named("8192/256"), cell_named("9/9")], [25], rates, [], TIMING, 2
    )
    assert [(run.cell.name, run.rate_per_s) for run in start.runs] == [
        *(("8192/256", 4.0), ("8192/256", 4.5)),
        ("9/9", 3.0),
    ]
    with pytest.raises(ValueError, match="quick"):
        rates_by_cell(["8192/256=quick"])


def test_a_rate_counts_behind_two_lifetimes_and_one_more_follows() -> None:
    (start,) = plan(["auto"], [CELLS["8192/256"]], [25], {ANY_CELL: [5, 4]}, [], TIMING, 2)
    assert [run.rate_per_s for run in start.runs] == [4, 5]
    run = start.runs[0]
    workload = run.workload()
    assert (workload.warmup_s, workload.duration_s) == (6.0, 69.0)
    assert run.most_s == 5 + 69 + 3
    seeds = {arrival.prompt.seeds for one in start.runs for arrival in one.workload().arrivals}
    assert len(seeds) == sum(len(one.workload().arrivals) for one in start.runs)


def test_all_modes_and_ys_get_the_same_load_of_other_prompts() -> None:
    modes = ["auto", "aggregated", "disaggregated", "vllm-512"]
    starts = plan(modes, [cell_named("sharegpt")], [25, 50], {ANY_CELL: [4]}, [], TIMING, 2)
    loads = [run.workload().arrivals for start in starts for run in start.runs]
    assert len(loads) == 2 + 2 + 1 + 1
    reported = [[(a.at_s, a.prompt.num_tokens, a.num_output_tokens) for a in one] for one in loads]
    assert all(one == reported[0] for one in reported)
    prompts = [{arrival.prompt.seeds for arrival in one} for one in loads[:2]]
    assert not prompts[0] & prompts[1]


def test_results_are_kept_by_key_and_resumed(tmp_path: Path) -> None:
    starts = [
        *plan(
            ["auto", "disaggregated"], [CELLS["8192/256"]], [25], {ANY_CELL: [4, 5]}, [], TIMING, 2
        )
    ]
    path, first = tmp_path / "goodput.json", starts[0].runs[0]
    earlier = Results(path, "c1", "command", "H200")
    earlier.add(key_of("auto", first), {"attained": {"25": 0.5}})
    later = Results(path, "c1", "command", "H200")
    requested = Namespace(num_gateways=1, margin=0.04)
    rest = without_measured(starts, later, requested)
    assert [(start.mode, len(start.runs)) for start in rest] == [("auto", 1), ("disaggregated", 2)]
    start = Start("auto", 25, (first,))
    assert without_measured([start], later, requested) == []
    requested.num_gateways = 2
    assert without_measured([start], later, requested) == [start], "another system"
    assert not Results(path, "c2", "command", "H200").has(key_of("auto", first))
    assert not Results(path, "c1", "command", "H100").has(key_of("auto", first))
    later.add(key_of("auto", first), {"attained": {"25": 0.7}})
    content = Results(path, "c1", "", "H200")._content
    assert [row["attained"] for row in content["rows"]] == [{"25": 0.7}]
    assert [row["call"] for row in content["rows"]] == [1]


def test_a_mode_with_more_than_the_defaults_is_called_by_it() -> None:
    requested = Namespace(num_gateways=2, margin=0.08)
    assert label("auto", requested) == "auto, 2 gateways, margin 0.08"
    assert label("2+2", requested) == "2+2, 2 gateways"
    assert label("vllm-512", requested) == "vllm-512"


def test_a_mode_may_fix_the_split() -> None:
    assert split_of("1+3") == (1, 3)
    assert [*map(split_of, ("disaggregated", "auto", "vllm-512", "1+", "0+2"))] == [None] * 5
    of_four = (["3+1"], [CELLS["8192/256"]], [25.0], {ANY_CELL: [2.0]}, [1.0], TIMING, 4)
    (start,) = plan(*of_four, 4)
    assert start.mode == "3+1" and start.promise_ms is None
    with pytest.raises(ValueError, match="more engines than there are: 3"):
        list(plan(*of_four, 3))


def test_the_plan_is_printed_and_nothing_begins(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "llama-3.2-1b", "--gpus", "0,1", "--cells", "8192/256", "--plan"]
    assert main([*arguments, "--modes", "auto", "--y", "25", "--start-s", "30"]) == 0
    printed = capsys.readouterr().out
    assert "8192/256 at 5.8/s, Y 25 ms: 77 s" in printed
    assert "minutes at most, 1 starts" in printed


def test_a_shape_has_a_tokenizer_that_a_gateway_can_use(tmp_path: Path) -> None:
    write_model(Shape("tiny", 2, 32, 4, 2, 8, 64, 300), tmp_path)
    served = ServedModel.load(GatewayConfig(model=str(tmp_path)))
    assert served.tokenizer is not None
