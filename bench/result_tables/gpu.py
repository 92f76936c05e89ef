"""Tables of single engines and of the copy between two GPUs."""

from __future__ import annotations

from typing import Any

from .results import Row, bound_of, figure_table, figures, load, number, source, table, target

_SUMMARY = {  # README's rows, and the names of their figures
    "decode step, 1 x 1k context": "decode 1 x 1024",
    "decode step, 64 x 4k": "decode 64 x 4096",
    "decode step, 256 x 1k": "decode 256 x 1024",
    "prefill, 1024 tokens": "prefill 1 x 1024",
    "prefill, 8192 tokens": "prefill 1 x 8192",
    "prefill, 16 x 512 tokens": "prefill 16 x 512",
    "start to ready, weights in the page cache": "start to ready",
}
_SHAPES = {
    "Llama-3.1-8B": "gpu",
    "Qwen3-8B": "gpu_qwen3-8b",
    "Llama-3.2-1B": "gpu_llama-3.2-1b",
}
_QUANTISED = {
    "8B": "gpu",
    "FP8": "gpu_fp8",
    "FP8 in blocks": "gpu_fp8_block",
    "FP8, KV too": "gpu_fp8_kv8",
    "int4": "gpu_int4",
    "30B-A3B": "gpu_30b-a3b",
    "30B-A3B in FP8": "gpu_30b-a3b_fp8",
    "30B-A3B in int4, H100": "gpu_30b-a3b_int4_h100",
}
_H100S = {
    "one H100": "gpu_h100",
    "two, `--pp 2`": "gpu_h100_pp2",
    "two, `--tp 2`": "gpu_h100_tp2",
}
_PARALLEL = {
    "8B, `--tp 2`": "gpu_tp2",
    "8B, `--tp 4`": "gpu_tp4",
    "30B-A3B, `--tp 2`": "gpu_30b-a3b_tp2",
    "70B, `--tp 4`": "gpu_tp4_70b",
    "70B, `--tp 4`, H100s": "gpu_tp4_70b_h100",
}
_COPY_SIZES = {
    "one block, 2 MiB": "16 tokens, 2 MiB blocks",
    "256 tokens, 32 MiB": "256 tokens, 2 MiB blocks",
    "2048 tokens, 256 MiB": "2048 tokens, 2 MiB blocks",
    "8192 tokens, 1 GiB": "8192 tokens, 2 MiB blocks",
    "32768 tokens, 4 GiB": "32768 tokens, 2 MiB blocks",
    "8192 tokens, 64 MiB in blocks of 128 KiB": "8192 tokens, 128 KiB blocks",
    "8192 tokens in FP8, 528 MiB": "8192 tokens, 8-bit blocks",
}
_PRODUCTS = ("qkv 6144 x 4096", "out 4096 x 4096", "gate_up 28672 x 4096", "down 4096 x 14336")


def summary() -> str:
    """One H200 beside its floors and vLLM."""
    found, vllm = figures("gpu"), load("copied_by_hand")["vllm"]["single"]
    return table(
        ("", "floor", "Baton", "vLLM 0.26"),
        [
            (
                row,
                number(bound_of(found[name]), found[name]["unit"]),
                number(found[name]["median"], found[name]["unit"]),
                number(vllm[name], found[name]["unit"]),
            )
            for row, name in _SUMMARY.items()
            if name in found
        ],
    )


def steps() -> str:
    """Every step of one GPU: the 8B shape with its floors and targets."""
    found = figures("gpu")
    rows = []
    for name, figure in found.items():
        if ": off the GPU" in name or name.endswith("back to back"):
            continue
        behind, host = found.get(f"{name}, back to back"), found.get(f"{name}: off the GPU")
        rows.append(
            (
                name,
                number(bound_of(figure), figure["unit"]),
                number(figure["median"], figure["unit"]),
                target(figure),
                number(behind and behind["median"]),
                number(host and host["median"]),
            )
        )
    head = ("step", "floor", "median", "target", "back to back", "GPU idle in it")
    return table(head, rows) + "\n" + source("gpu")


def shapes() -> str:
    """The steps that all shapes have, each with its floor."""
    return _beside(_SHAPES, "Qwen3-8B")


def quantised() -> str:
    """The same of weights and KV in 8 and 4 bits, and of a mixture of experts."""
    return _beside(_QUANTISED, "30B-A3B")


def on_h100s() -> str:
    """One card, and two as stages or as ranks of one stage."""
    return _beside(_H100S, "one H100") + "\n" + source("gpu_h100")


def _beside(files: dict[str, str], named_by: str) -> str:
    """The steps of one of these files, in all of them; the first is that of another table."""
    of_title = {title: figures(name) for title, name in files.items()}
    names = [
        name
        for name in of_title[named_by]
        if not name.endswith("back to back")
        and (": " not in name or name.endswith("experts touched"))
    ]
    rows = [
        (name, *(_with_floor(found.get(name)) for found in of_title.values())) for name in names
    ]
    head = ("ms, floors in brackets", *of_title)
    lines = [source(name) for name in list(files.values())[1:]]
    return table(head, rows) + "\n" + "\n".join(lines)


def _with_floor(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return ""
    return f"{number(figure['median'])} ({number(bound_of(figure))})"


def host_tier() -> str:
    """Copies to host memory and back, what they save, and what they cost the steps beside them."""
    found = figures("host_tier").values()
    shown = figure_table(f for f in found if ": the call" not in f["name"])
    return shown + "\n" + source("host_tier")


def copies() -> str:
    """What a pull takes, by size, layout and method."""
    found = figures("handoff")
    methods = ("kernel", "kernel, prepared", "copy-engine", "copy-engine, prepared", "nccl")
    rows = []
    for title, name in _COPY_SIZES.items():
        for layout in ("scattered", "in one piece"):
            cells = [found.get(f"{name}, {layout}, {method}") for method in methods]
            floor = next(cell for cell in cells if cell is not None)["floor"]
            medians = [number(cell and cell["median"]) for cell in cells]
            rows.append((f"{title}, {layout}", number(floor), *medians))
    head = ("ms", "floor", "kernel", "prepared", "copy engines", "prepared", "`nccl`")
    return table(head, rows) + "\n" + source("handoff")


def sums() -> str:
    """All-reduces over two and four GPUs, and what is fused with them."""
    rows: list[Row] = []
    for kib in (4, 32, 128, 512, 1024, 2048):
        cells: list[str] = []
        for num_ranks in (2, 4):
            name, found = f"{kib} KiB over {num_ranks} GPUs", figures(f"allreduce{num_ranks}")
            ours = min((found[f"{name}, {way}"] for way in ("at once", "in parts")), key=_median)
            nccl = found[f"{name}, NCCL"]["median"]
            cells += [number(ours["floor"]), number(nccl), number(_median(ours))]
        rows.append((f"sum of {kib} KiB", *cells))
    for shape in ("1 x 4096", "64 x 4096", "64 x 8192"):
        cells = []
        for num_ranks in (2, 4):
            name, found = f"{shape} over {num_ranks} GPUs", figures(f"allreduce{num_ranks}")
            nccl = found[f"{name}, sum by NCCL, then norm"]["median"]
            cells += ["", number(nccl), number(_median(found[f"{name}, sum and norm at once"]))]
        rows.append((f"residual sum and norm, {shape}", *cells))
    head = (
        "us",
        *("floor", "NCCL, two H200s", "peer memory"),
        *("floor", "four H200s", "peer memory"),
    )
    return table(head, rows) + f"\n{source('allreduce2')}\n{source('allreduce4')}"


def sending_products() -> str:
    """Products that write what ranks add up to where it is added up."""
    rows: list[Row] = []
    for cards, file in (("two H200s", "allreduce2"), ("four H200s", "allreduce4")):
        found = figures(file)
        for name, figure in found.items():
            if not name.endswith("product that sends itself"):
                continue
            shape = name.split(" over")[0]
            apart = found[name.replace("product that sends itself", "product, then sum and norm")]
            medians = (number(one["median"]) for one in (apart, figure))
            rows.append((f"{cards}, {shape}", number(figure["floor"]), *medians))
    return table(("us", "floor (weight)", "product, then sum and norm", "sends itself"), rows)


def parallel() -> str:
    """Steps of engines on several GPUs."""
    rows = [
        (
            f"{title}, {name}",
            number(bound_of(figure)),
            number(figure["median"]),
            target(figure),
            figure.get("commit", load(file)["commit"]),
        )
        for title, file in _PARALLEL.items()
        for name, figure in figures(file).items()
        if ": off" not in name and not name.endswith("back to back")
    ]
    hand = load("copied_by_hand")["rank_of_70b"]
    rows.append(
        (
            hand["name"],
            number(hand["floor"]),
            number(hand["median"]),
            "",
            f"{hand['commit']} [^hand]",
        )
    )
    sources = "\n".join(source(file) for file in _PARALLEL.values())
    return table(("ms", "floor", "median", "target", "commit"), rows) + "\n" + sources


def products() -> str:
    """Products of 64 to 128 rows with the norm in front of them; "": cuBLAS is taken."""
    found = figures("products", "tp 1")
    rows = []
    for shape in _PRODUCTS:
        for num_rows in (64, 96, 128):
            of_shape = {n: f for n, f in found.items() if n.startswith(f"{shape}, {num_rows} rows")}
            taken = [number(_median(f)) for n, f in of_shape.items() if n.endswith("taken")]
            cublas = of_shape[f"{shape}, {num_rows} rows: cublas"]
            medians = (number(cublas["floor"]), number(_median(cublas)), *(taken or [""]))
            rows.append((f"{shape}, {num_rows} rows", *medians))
    return table(("us", "floor", "cuBLAS", "streamed"), rows) + "\n" + source("products")


def prompts_attention() -> str:
    """Attention of a step's prompts, by how many tokens there are behind how many."""
    rows = []
    for name, figure in figures("prefill_attention").items():
        case, _, whose = name.partition(": ")
        medians = [number(figure["floor"]), number(figure["median"])]
        if whose == "FA3":
            rows[-1] += (medians[1],)
        else:
            rows.append((case, *medians))
    rows = [(*row, "")[:4] for row in rows]
    return table(("us", "floor", "ours", "FA3"), rows) + "\n" + source("prefill_attention")


def _median(figure: dict[str, Any]) -> float:
    return float(figure["median"])
