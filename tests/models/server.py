"""A small OpenAI-compatible server around a real model, which misbehaves where it is told to."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from statewise.models.generate import InProcessSampler
from statewise.models.load import load_policy
from statewise.models.score import InProcessScorer
from statewise.types import Sampling

TAKING = ("/collective_rpc", "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
Fault = Callable[[int, dict[str, Any]], str | None]


@dataclass
class Server:
    """fault(number of the request, its body): what goes wrong with a completion, None for nothing.

    takes_weights: as with VLLM_SERVER_DEV_MODE; `told` is what it was told of weights.
    dialect: "vllm", "vllm_old" (token ids in `logprobs.tokens` only), "echo" (ids named), "text" (texts only).
    """

    path: Path
    fault: Fault = lambda number, body: None
    dialect: str = "vllm"
    processed: bool = False
    max_logprobs: int = -1
    key: str | None = None
    models: tuple[str, ...] = ("teacher",)
    context: int = 256
    takes_weights: bool = True
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.policy = load_policy(str(self.path))
        self.scorer = InProcessScorer(self.policy.model, pad_id=0)
        self.sampler = InProcessSampler(self.policy.model, pad_id=0)
        self.vocabulary = self.policy.model.config.vocab_size
        self.lock, self.counting, self.at_once = threading.Lock(), threading.Lock(), 0

    def name(self, token: int) -> str:
        return self.policy.tokenizer.decode([token]) if self.dialect == "text" else f"token_id:{token}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": m, "max_model_len": self.context} for m in self.models]}
        if self.takes_weights and path in TAKING:
            self.told.append((path, body))
            if path == "/collective_rpc":
                state = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
                self.policy.model.load_state_dict(state)
            return 200, {"results": [None]} if path == "/collective_rpc" else "Success"
        if path == "/tokenize" and self.dialect in ("vllm_old", "echo"):
            return 200, {"tokens": self.policy.tokenizer.encode(body["prompt"], add_special_tokens=False)}
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        return self.complete(body)

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt = body["prompt"]
        ids = self.policy.tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
        wanted = max(body.get(name) or 0 for name in ("logprobs", "prompt_logprobs"))
        wanted = self.vocabulary if -1 in (body.get("logprobs"), body.get("prompt_logprobs")) else wanted
        if 0 <= self.max_logprobs < wanted:
            return 400, {"error": {"message": f"Requested prompt logprobs of {wanted}, which is greater than max"}}
        if body.get("echo") and body["max_tokens"] == 0 and self.dialect == "text":
            return 400, {"error": {"message": "max_tokens must be at least 1"}}
        with self.lock:
            choice = self.generated(ids, body)
            if self.dialect.startswith("vllm") and body.get("prompt_logprobs") is not None:
                choice["prompt_logprobs"] = self.prompt_logprobs(ids, body["prompt_logprobs"])
            if body.get("echo") and self.dialect != "vllm_old":
                choice["logprobs"] = self.echoed(ids, body["logprobs"], choice["logprobs"])
        if self.dialect == "vllm" and body.get("return_token_ids"):
            choice["prompt_token_ids"] = ids
        return 200, {"model": body["model"], "choices": [choice]}

    def generated(self, ids: Sequence[int], body: dict[str, Any]) -> dict[str, Any]:
        sampling = Sampling(
            body["max_tokens"],
            body.get("temperature", 1.0),
            stop_ids=tuple(body.get("stop_token_ids") or self.policy.stop_ids),
            seed=body.get("seed") or 0,
        )
        (done,) = self.sampler.generate([ids], sampling)
        values = list(done.logprobs)
        if not self.processed and done.tokens:
            values = self.scorer.score([[*ids, *done.tokens]])[0]["logprobs"][len(ids) :]
        logprobs = {"tokens": [self.name(t) for t in done.tokens], "token_logprobs": values}
        choice = {"index": 0, "text": "", "finish_reason": done.stop_reason, "logprobs": logprobs}
        return choice | ({"token_ids": list(done.tokens)} if self.dialect == "vllm" else {})

    def tops(self, ids: Sequence[int], k: int) -> list[dict[int, float] | None]:
        """{id: log-probability} a token: the prompt's own and the k most probable."""
        part = self.scorer.topk([ids], self.vocabulary if k == -1 else k)[0]
        out: list[dict[int, float] | None] = [None]
        for place in range(1, len(ids)):
            best = zip(part.ids[place].tolist(), part.values[place].tolist(), strict=True)
            out.append({ids[place]: float(part.logprobs[place]), **dict(best)})
        return out

    def prompt_logprobs(self, ids: Sequence[int], k: int) -> list[Any]:
        return [top and {str(i): {"logprob": v, "rank": 1} for i, v in top.items()} for top in self.tops(ids, k)]

    def echoed(self, ids: Sequence[int], k: int, generated: dict[str, Any]) -> dict[str, Any]:
        tops = self.tops(ids, k)
        own = [top and top[i] for top, i in zip(tops, ids, strict=True)]
        return {
            "tokens": [*map(self.name, ids), *generated["tokens"]],
            "token_logprobs": [*own, *generated["token_logprobs"]],
            "top_logprobs": [top and {self.name(i): v for i, v in top.items()} for top in tops],
        }


def broken(answer: Any, fault: str) -> Any:
    """A good answer with one fault."""
    choice = answer["choices"][0]
    entries, logprobs = choice.get("prompt_logprobs"), choice.get("logprobs")
    if fault == "no_logprobs":
        choice["prompt_logprobs"] = choice["logprobs"] = None
    elif fault == "two_choices":
        answer["choices"] *= 2
    elif fault == "aborted":
        choice["finish_reason"] = "abort"
    elif fault == "short":
        choice["prompt_logprobs"] = entries and entries[:-1]
        logprobs["token_logprobs"] = logprobs["token_logprobs"][:-1]
    elif fault == "other_ids":
        choice["prompt_logprobs"] = entries and [e and {str(int(k) + 1000): v for k, v in e.items()} for e in entries]
        choice["token_ids"] = [100_000] * len(choice.get("token_ids") or [1])
    elif fault == "nan":
        for entry in (entries or [])[2:3]:
            entry[next(iter(entry))]["logprob"] = float("nan")
        logprobs["token_logprobs"][-1] = float("nan")
    elif fault == "above_zero":
        for entry in (entries or [])[2:3]:
            entry[next(iter(entry))]["logprob"] = 0.5
        logprobs["token_logprobs"][-1] = 0.5
    return answer


class Handler(BaseHTTPRequestHandler):
    server_of: Server

    def log_message(self, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        self.respond({})

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def respond(self, body: dict[str, Any]) -> None:
        own = self.server_of
        if own.key is not None and self.headers.get("Authorization") != f"Bearer {own.key}":
            return self.send(401, {"error": {"message": f"Incorrect API key: {self.headers.get('Authorization')}"}})
        fault = None
        if self.path.endswith("/completions"):
            with own.counting:
                own.at_once += 1
                own.most_at_once = max(own.most_at_once, own.at_once)
                number = len(own.asked)
                own.asked.append(body)
            fault = own.fault(number, body)
        self.misbehave(fault, body)

    def misbehave(self, fault: str | None, body: dict[str, Any]) -> None:
        own = self.server_of
        if fault == "drop":
            return self.connection.close()
        if fault == "hang":
            time.sleep(8.0)
            return None
        if fault == "slow":
            time.sleep(0.05)
        if fault is not None and fault[:3].isdigit():
            status, _, after = fault.partition(":")
            return self.send(int(status), {"error": {"message": "not now"}}, {"Retry-After": after} if after else {})
        if fault == "html":
            return self.send(200, None, text=b"<html>a proxy</html>")
        status, answer = own.answer(self.path, body)
        with own.counting:
            own.at_once -= self.path.endswith("/completions")
        if status == 200 and fault is not None:
            answer = broken(answer, fault)
        if fault == "truncate":
            return self.send(200, answer, cut=20)
        if fault == "trickle":
            return self.trickle(answer)
        return self.send(status, answer)

    def send(
        self, status: int, answer: Any, headers: dict[str, str] | None = None, *, cut: int = 0, text: bytes = b""
    ) -> None:
        data = text or json.dumps(answer, default=_plain).encode()
        try:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) - cut])
        except OSError:  # the client has left
            return

    def trickle(self, answer: Any) -> None:
        """One byte at a time, each well inside any time limit."""
        data = json.dumps(answer, default=_plain).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            for place in range(len(data)):
                self.wfile.write(data[place : place + 1])
                time.sleep(0.02)
        except OSError:
            return


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


@contextmanager
def serving(server: Server, port: int = 0) -> Iterator[Server]:
    handler = type("Bound", (Handler,), {"server_of": server})
    http = ThreadingHTTPServer(("127.0.0.1", port), handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
