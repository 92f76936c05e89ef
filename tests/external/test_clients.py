"""Third-party clients against a deployment; each runs if its program is installed.

docs/clients.md describes their installation, and lists their results.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deployments import running
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.core.engine_config import EngineConfig

pytestmark = [pytest.mark.external, pytest.mark.timeout(600)]

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
PAIRS = [
    ["def read_file(path):\n    ", "return open(path).read()"],
    ["class A:\n    def __init__(self", ", x):\n        self.x = x"],
    ["x = é", " + 1"],
    ["def f(x):\n", '    """'],
]
LM_EVAL = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
url, model_dir, pairs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = LocalCompletionsAPI(
    model="demo", base_url=f"{url}/v1/completions", tokenizer=model_dir,
    tokenizer_backend="huggingface", num_concurrent=2, max_length=256, batch_size=2,
)
asked = [Instance("loglikelihood", {}, tuple(pair), i) for i, pair in enumerate(pairs)]
print("RESULT", json.dumps([[score, bool(greedy)] for score, greedy in model.loglikelihood(asked)]))
"""


def needs(name: str) -> pytest.MarkDecorator:
    """Skip before any deployment is started."""
    return pytest.mark.skipif(find(name) is None, reason=f"{name} is not installed")


def find(name: str) -> str | None:
    """The program of this environment, or the one on the PATH."""
    return shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)


def program(name: str) -> str:
    found = find(name)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a deployment with a short context, so that requests for all remaining tokens end
    soon."""
    config = EngineConfig(model=str(DEMO), device="cpu", cpu_kv_bytes=64 << 20, max_model_len=256)
    with running(config) as system:
        (line,) = [line for line in system.lines if line.startswith("gateway | ready:")]
        yield line.split()[-2]


def run(*argv: str, cwd: Path | None = None) -> str:
    """The program's output; fails if the program fails."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_HUB_OFF"))
    }
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def wanted_score(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """As defined by the harness: trailing spaces of the context belong to the continuation."""
    whole = tokenizer(context + continuation).input_ids
    first = len(tokenizer(context.rstrip()).input_ids)
    with torch.inference_mode():
        scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    places = range(first, len(whole))
    return (
        sum(float(scores[i - 1, whole[i]]) for i in places),
        all(int(scores[i - 1].argmax()) == whole[i] for i in places),
    )


@needs("lm_eval")
def test_lm_eval_scores_as_transformers_does(url: str) -> None:
    python = str(Path(program("lm_eval")).with_name("python"))
    output = run(python, "-c", LM_EVAL, url, str(DEMO), json.dumps(PAIRS))
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    for pair, (score, is_greedy) in zip(PAIRS, json.loads(line[7:]), strict=True):
        wanted, wants_greedy = wanted_score(model, tokenizer, *pair)
        assert score == pytest.approx(wanted, abs=1e-3)
        assert is_greedy == wants_greedy


@needs("guidellm")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(url: str, tmp_path: Path, path: str) -> None:
    run(
        program("guidellm"), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url},request_format={path}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=hf_auto,model={DEMO}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--output", f"kind=json,path={tmp_path / 'report.json'}",
    )  # fmt: skip
    metrics = json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]["metrics"]
    assert (metrics["request_totals"]["successful"], metrics["request_totals"]["errored"]) == (6, 0)
    assert metrics["output_token_count"]["successful"]["mean"] == 16


@needs("aiperf")
def test_aiperf(url: str, tmp_path: Path) -> None:
    run(
        program("aiperf"), "profile", "--model", "demo", "--url", url, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", str(DEMO), "--request-count", "8", "--concurrency", "2",
        "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16",
        "--extra-inputs", "ignore_eos:true", "--ui", "none", cwd=tmp_path,
    )  # fmt: skip
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == 8
    assert "error_request_count" not in found or found["error_request_count"]["avg"] == 0


@needs("vllm-rs")
@pytest.mark.parametrize(
    ("backend", "path"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_vllm_bench_serve(url: str, tmp_path: Path, backend: str, path: str) -> None:
    """vLLM's own client works: the program `vllm-rs` of its wheel needs nothing else.

    Its random prompts are random ids as text, and few ids of a byte-level vocabulary of 4096 are
    text.
    """
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(8)))
    run(
        program("vllm-rs"), "bench", "serve", "--backend", backend, "--base-url", url,
        "--endpoint", path, "--model", "demo", "--tokenizer", str(DEMO),
        "--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", "16",
        "--skip-chat-template", "--ignore-eos", "--num-prompts", "8", "--max-concurrency", "2",
        "--disable-tqdm", "--no-steady-state",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["completed"], found["total_output_tokens"]) == (8, 8 * 16)
    assert found["median_ttft_ms"] > 0
    assert found["median_itl_ms"] > 0


@needs("curl")
def test_curl(url: str) -> None:
    """The examples of docs/http.md work as printed."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text()
    block = page.split("```")[1]
    lines = block.replace("\\\n", "").strip().replace("localhost:8000", url)
    assert lines.count("curl ") == 2
    output = run("sh", "-ec", lines)
    assert '"object": "text_completion"' in output or '"object":"text_completion"' in output
    assert "data: [DONE]" in output


@needs("schemathesis")
def test_schemathesis(url: str, tmp_path: Path) -> None:
    """No 5xx, no undocumented status, no response that breaks its schema, no invalid request
    accepted.

    Rules between fields (stream_options need stream) are in no schema: valid data may be refused.
    """
    output = run(
        program("schemathesis"), "run", f"{url}/openapi.json", "--max-examples", "10",
        "--phases", "coverage,fuzzing", "--request-timeout", "20",
        "--include-path-regex", r"^/(v1|tokenize|detokenize|server_info|openapi|live|ready|health)",
        "--exclude-checks", "positive_data_acceptance", cwd=tmp_path,
    )  # fmt: skip
    print(output[-500:], file=sys.stderr)
