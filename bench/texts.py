"""`python -m baton.bench.texts`: the effect of four callers with the largest texts on all streams.

    8 streams of a token each 20 ms ◄── gateway ◄── 4 callers: the largest texts, one after another
The model is the demo's with a context of 131,072 tokens, so that nearly a whole body is allowed.
Figures are the longest gap of any stream, beyond a step; without the callers, then with them at
each endpoint that accepts texts. Written to bench/results/texts.json.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import grpc

from baton.core.model_dir import resolve_model_dir
from baton.proto.v1 import inference_pb2

from .floors.figures import ROOT, Figure, machine, table, write
from .front import gateway, load
from .played.front_load import LoadPlan

TARGET_MS = 100.0
_CONTEXT = 131_072
_NUM_CALLERS, _NUM_STREAMS, _NUM_TOKENS, _STEP_S = 4, 8, 300, 0.02
_MAX_BODY_BYTES = (4 << 20) - 1024
_WORDS = "the read of file in 12 steps, "
_METHOD = "/baton.v1.Inference/{0}"

Send = Callable[[], Any]


def _texts() -> dict[str, str]:
    """The largest texts that fit the context, and that are not refused before they are
    tokenised."""
    return {
        "newlines": "\n" * (_CONTEXT - 1),
        "spaces": " " * 3_000_000,
        "words": (_WORDS * (_MAX_BODY_BYTES // len(_WORDS)))[:_MAX_BODY_BYTES],
    }


def _places(addresses: dict[str, str]) -> dict[str, list[Send]]:
    """By endpoint, the requests that its callers send in turn."""
    texts, ids = _texts(), [300] * _CONTEXT
    fields = {"model": "demo", "max_tokens": 1}
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v1/completions": [{**fields, "prompt": text} for text in texts.values()],
        "/v1/chat/completions": [
            {**fields, "messages": [{"role": "user", "content": text[:-1000]}]}
            for text in texts.values()
        ],
        "/tokenize": [{"prompt": text} for text in texts.values()],
        "/detokenize": [{"tokens": ids}],
    }
    places: dict[str, list[Send]] = {
        path: [_post(f"http://{addresses['sse']}{path}", body) for body in found]
        for path, found in bodies.items()
    }
    channel = grpc.insecure_channel(addresses["grpc"], [("grpc.max_receive_message_length", -1)])
    generate = channel.unary_stream(_METHOD.format("Generate"))
    places["gRPC Generate"] = [
        partial(_all_of, generate, _generate(text)) for text in texts.values()
    ]
    messages: dict[str, list[Any]] = {
        "Tokenize": [inference_pb2.TokenizeRequest(text=text) for text in texts.values()],
        "Detokenize": [inference_pb2.DetokenizeRequest(ids=ids)],
    }
    for method, of_texts in messages.items():
        call = channel.unary_unary(_METHOD.format(method))
        places[f"gRPC {method}"] = [partial(call, m.SerializeToString()) for m in of_texts]
    return places


def _all_of(generate: Any, wire: bytes) -> None:
    for _ in generate(wire):
        pass


def _generate(text: str) -> bytes:
    wire = inference_pb2.GenerateRequest(text=text)
    wire.sampling.max_tokens = 1
    return bytes(wire.SerializeToString())


def _post(url: str, body: dict[str, Any]) -> Send:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})

    def send() -> None:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()

    return send


@contextmanager
def _callers(sends: list[Send], outcomes: Counter[str]) -> Iterator[None]:
    """Four threads that send all requests in turn until the block ends."""
    is_over = threading.Event()

    def call() -> None:
        for send in cycle(sends):
            if is_over.is_set():
                return
            try:
                send()
                outcomes["answered"] += 1
            except (urllib.error.HTTPError, grpc.RpcError):
                outcomes["refused"] += 1

    threads = [threading.Thread(target=call) for _ in range(_NUM_CALLERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _silence_ms(address: str) -> float:
    """The longest gap of all streams, beyond the engine's step."""
    plan = LoadPlan("sse", "", _NUM_STREAMS, num_tokens=_NUM_TOKENS, keeps_times=True)
    (found,) = load(plan, {"sse": address})
    if found["errors"]:
        raise RuntimeError(f"streams failed: {found['errors']}")
    gaps_s = [b - a for s in found["streams"] for a, b in pairwise(s["times_s"])]
    return (max(gaps_s) - _STEP_S) * 1e3


def _long_context(folder: Path) -> Path:
    """The demo model as the gateway reads it, with a longer context."""
    shutil.copytree(resolve_model_dir("demo"), folder, ignore=shutil.ignore_patterns("*.safe*"))
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = _CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def texts() -> list[Figure]:
    """The longest gap, by the endpoint that the callers use."""
    with tempfile.TemporaryDirectory() as above:
        model = ("--model", str(_long_context(Path(above) / "demo")))
        pace = ("--step-s", str(_STEP_S), "--max-model-len", str(_CONTEXT))
        with gateway(*pace, options=model) as addresses:
            alone_ms = _silence_ms(addresses["sse"])
            figures = []
            for place, sends in _places(addresses).items():
                outcomes: Counter[str] = Counter()
                with _callers(sends, outcomes):
                    found_ms = _silence_ms(addresses["sse"])
                name = f"{place}: {outcomes['answered']} answered, {outcomes['refused']} refused"
                figures.append(
                    Figure(name, "ms", (found_ms,), alone_ms, "without callers", TARGET_MS)
                )
    return figures


def main() -> int:
    """Measure and write the figures."""
    where = machine()
    found = texts()
    print(table(found))
    write(ROOT / "bench" / "results" / "texts.json", {"texts": found}, where, "texts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
