"""What statewise asks of vLLM, asked of the real thing on the embedded model; `make test-vllm` runs it.

Skipped where vLLM is not installed, as in CI: it needs an environment of its own (it pins torch and transformers).
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` makes an environment with it")

from statewise.errors import EndpointError
from statewise.models.engines import LocalEngine, start_engine
from statewise.models.load import LoadedPolicy, load_policy
from statewise.models.score import InProcessScorer
from statewise.models.vllm import HandOver, VllmSampler, all_tensors, default_gap
from statewise.run import RunDir
from statewise.settings import Adapter, ModelSettings
from statewise.tiny import model_path
from statewise.types import Sampling

PROMPTS = [[5, 6, 7, 8, 9, 10] * 4, [11, 12, 13], [40, 41], [200] * 9]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
os.environ.update(ENVIRONMENT)
F32 = default_gap(torch.float32)


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    """One engine for all tests: it takes whole weights and adapters."""
    return start_engine(
        str(model_path()),
        dtype="float32",
        memory=0.3,
        max_length=256,
        max_rows=32,
        lora_rank=8,
        options={"enforce_eager": True},
    )


@pytest.fixture
def sampler(engine: LocalEngine) -> VllmSampler:
    engine.adapter = None
    return VllmSampler(engine, F32)


@pytest.fixture
def policy() -> LoadedPolicy:
    return load_policy("tiny")


def move(policy: LoadedPolicy, size: float = 0.02) -> None:
    """Every trained tensor elsewhere."""
    torch.manual_seed(int(size * 1000))
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name or not hasattr(policy.model, "peft_config"):
                parameter.add_(torch.randn_like(parameter) * size)


def worst_gap(sampler: VllmSampler, policy: LoadedPolicy, **law: Any) -> float:
    """Between the log-probabilities of samples and of the trainer."""
    sampling = Sampling(12, stop_ids=policy.stop_ids, seed=3, **law)
    done = sampler.generate(PROMPTS, sampling)
    texts = [[*p, *c.tokens] for p, c in zip(PROMPTS, done, strict=True)]
    scored = InProcessScorer(policy.model, pad_id=0).score(texts, temperature=sampling.temperature or 1.0)
    return max(
        abs(a - b)
        for p, c, values in zip(PROMPTS, done, scored, strict=True)
        for a, b in zip(c.logprobs, values["logprobs"][len(p) :], strict=True)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_log_probabilities_are_those_of_the_law(sampler: VllmSampler, policy: LoadedPolicy, temperature: float):
    sampler.load(policy, 0)
    assert worst_gap(sampler, policy, temperature=temperature) < 1e-4


def test_ends_and_streams(sampler: VllmSampler, policy: LoadedPolicy):
    sampler.load(policy, 0)
    sampling = Sampling(60, stop_ids=(*policy.stop_ids, 71), seed=1)
    done = sampler.generate(PROMPTS, sampling, rows=[5, 6, 7, 8])
    assert sampler.generate(PROMPTS[2:], sampling, rows=[7, 8]) == done[2:], "a row's stream is its own"
    assert sampler.generate(PROMPTS, sampling, rows=[1, 2, 3, 4]) != done
    for completion in done:
        ends = [t in sampling.stop_ids for t in completion.tokens]
        assert not any(ends[:-1]) and ends[-1] == (completion.stop_reason == "stop")
    full, room = sampler.generate([[7] * 256, [7] * 250], Sampling(50, seed=1))
    assert full.tokens == () and len(room.tokens) <= 6


def test_nothing_cuts_the_law(sampler: VllmSampler, policy: LoadedPolicy):
    """At a high temperature tokens beyond any default top_k are drawn, as often as they are probable."""
    sampler.load(policy, 0)
    prompt, hot = PROMPTS[1], 2.0
    draws = sampler.generate([prompt] * 600, Sampling(1, temperature=hot, seed=2))
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt])).logits[0, -1]
    rank = logits.argsort(descending=True).argsort()
    share = sum(int(rank[c.tokens[0]]) >= 50 for c in draws) / len(draws)
    expected = float((logits / hot).softmax(-1)[rank >= 50].sum())
    assert expected > 0.02 and abs(share - expected) < 4 * (expected * (1 - expected) / 600) ** 0.5


def test_weights_are_handed_over_and_old_ones_noticed(sampler: VllmSampler, policy: LoadedPolicy):
    sampler.load(policy, 0)
    worst_gap(sampler, policy)
    for version in (1, 2):
        move(policy, 0.02 * version)
        sampler.load(policy, version)
        assert worst_gap(sampler, policy) < 1e-4 and sampler.version == version
        assert sampler.last_gap is not None and sampler.last_gap < 1e-5
    move(policy, 0.03)
    sampler._unchecked = True  # as if the hand-over had done nothing
    with pytest.raises(EndpointError, match="hand-over of step 2 its log-probabilities differ"):
        worst_gap(sampler, policy)


def test_a_tied_head_that_stays_behind_is_noticed(sampler: VllmSampler, policy: LoadedPolicy):
    """vLLM, told of the embedding alone, keeps the old head without an error: why `all_tensors` names both."""
    sampler.load(policy, 0)
    move(policy, 0.02)
    assert "lm_head.weight" in all_tensors(policy.model)
    partial = {n: v for n, v in all_tensors(policy.model).items() if n != "lm_head.weight"}
    sampler.engine.hand_over(HandOver(1, lambda: partial, lambda folder: None, False))
    sampler.version, sampler._unchecked = 1, True
    with pytest.raises(EndpointError, match="log-probabilities differ"):
        worst_gap(sampler, policy)


def test_adapters_are_handed_over(sampler: VllmSampler, engine: LocalEngine):
    sampler.load(load_policy("tiny"), 0)
    settings = ModelSettings(path="tiny", adapter=Adapter(rank=8, alpha=16))
    policy = load_policy(settings, trainable=True)
    gaps = []
    for version in (0, 1, 2, 3):
        sampler.load(policy, version)
        gaps.append(worst_gap(sampler, policy))
        move(policy, 0.05 + 0.01 * version)
    assert max(gaps) < 1e-4
    assert len(list(engine.folders.root.iterdir())) == 2, "old versions are removed"
    sampler._unchecked = True
    with pytest.raises(EndpointError, match="log-probabilities differ"):
        worst_gap(sampler, policy)


# Whole runs


def statewise(*words: object) -> None:
    command = [sys.executable, "-m", "statewise", *map(str, words)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


SMALL = ["source.count=24", "source.max_tokens=24", "batch.rollouts=8", "budget.max_steps=3", "eval.tasks=[]"]


def gaps_of(run: Path) -> list[float]:
    return [row["behavior_gap"] for row in RunDir.open(run).metrics() if "behavior_gap" in row]


@pytest.mark.parametrize("adapter", [[], ["model.adapter.rank=8"]])
def test_a_run_with_vllm_inside(adapter: list[str], tmp_path: Path):
    vllm = "model.sampler={ engine = 'vllm', max_length = 256, options = { enforce_eager = true } }"
    changes = [*SMALL, *adapter, vllm, "optim.lr=1e-2", "source.group_size=4", "source.temperature=0.8"]
    statewise("train", "grpo", *changes, "--out", tmp_path / "run")
    gaps = gaps_of(tmp_path / "run")
    assert len(gaps) == 3 and max(gaps) < 1e-4, gaps


# A server


@contextmanager
def serving(log: Path, *settings: str) -> Iterator[str]:
    """What `vllm serve` runs; the command itself asks for the metadata of a package that vllm-cpu is not called."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_path())]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    command += ["--max-num-seqs", "32", "--enforce-eager", "--logprobs-mode", "processed_logprobs", *settings]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", **ENVIRONMENT}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=out, stderr=out, start_new_session=True
        )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


@pytest.fixture
def policy_server(tmp_path: Path) -> Iterator[str]:
    """One a run: whole weights that were handed over stay below the adapter of the next run."""
    with serving(tmp_path / "log", "--enable-lora", "--max-lora-rank", "8") as url:
        yield url


@pytest.fixture(scope="module")
def teacher_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Without --enable-lora, under which vLLM 0.32 on a CPU dies of prompt log-probabilities of several sequences."""
    with serving(tmp_path_factory.mktemp("teacher") / "log", "--max-logprobs", "-1") as url:
        yield url


@pytest.mark.parametrize("adapter", [[], ["model.adapter.rank=8"]])
def test_a_run_with_a_server(policy_server: str, adapter: list[str], tmp_path: Path):
    vllm = f"model.sampler={{ engine = 'vllm', url = '{policy_server}', max_rows = 16, folder = '{tmp_path / 'weights'}' }}"
    changes = [*SMALL, *adapter, vllm, "optim.lr=1e-2", "source.group_size=4", "source.temperature=0.8"]
    statewise("train", "grpo", *changes, "--out", tmp_path / "run")
    gaps = gaps_of(tmp_path / "run")
    assert len(gaps) == 3 and max(gaps) < 1e-4, gaps


@pytest.mark.parametrize("top_k", [5, 512])
def test_a_teacher_at_a_vllm_server(teacher_server: str, top_k: int, tmp_path: Path):
    """Losses equal those of the same teacher in the trainer's process."""
    student = load_policy("tiny")
    move(student, 0.02)
    student.model.save_pretrained(tmp_path / "student")
    student.tokenizer.save_pretrained(tmp_path / "student")
    teacher = load_policy("tiny")
    teacher.model.save_pretrained(tmp_path / "teacher")
    teacher.tokenizer.save_pretrained(tmp_path / "teacher")
    loss = f"objective.0.loss={{kind='kl_student_teacher', top_k={top_k}}}"
    losses = []
    for name, where in (("here", str(tmp_path / "teacher")), ("there", teacher_server)):
        changes = [*SMALL, loss, f"model.path={tmp_path / 'student'}", f"signal.0.teacher={where}"]
        statewise("train", "opd_topk", *changes, "--out", tmp_path / name)
        losses.append([row["loss"] for row in RunDir.open(tmp_path / name).metrics() if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], abs=1e-4) and losses[0][0] > 0.01


def test_a_teachers_text_from_a_vllm_server(teacher_server: str, tmp_path: Path):
    changes = [*SMALL, f"source.teacher={teacher_server}", "source.tokens=8"]
    statewise("train", "opd_continuation", *changes, "--out", tmp_path / "run")
    statewise("doctor", "opd_continuation", *changes)
