"""`statewise doctor`: what a healthy recipe looks like, and that each fault is found with exit code 1."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import model_dir  # noqa: F401 - a fixture

from statewise.models.load import load_tokenizer
from statewise.recipe import Recipe
from statewise.training import plan
from statewise.types import World

Cli = Callable[..., Any]


@pytest.fixture
def small(model_dir: Path) -> list[str]:  # noqa: F811
    return [f"model.path={model_dir}", "source.count=40"]


def findings(cli: Cli, *words: object) -> tuple[int, dict[str, Any]]:
    done = cli("doctor", *words, "--json")
    report = json.loads(done.out)
    assert report["healthy"] == (done.code == 0)
    return done.code, {f["check"]: f for f in report["findings"]}


def test_a_data_set(cli: Cli, small: list[str]) -> None:
    code, found = findings(cli, "dpo", *small)
    assert code == 0 and set(found) == {"tokenizer", "data", "evaluation", "memory"}
    assert {f["status"] for f in found.values()} == {"ok"}
    assert found["data"]["facts"]["with_end_token"] == 32
    assert found["data"]["facts"]["preview"].endswith("<|im_end|>⟧\n")
    assert found["tokenizer"]["facts"]["embeddings"] == 320


def test_rollouts_and_words_for_people(cli: Cli, small: list[str]) -> None:
    done = cli("doctor", "grpo", *small)
    assert done.code == 0 and done.err == ""
    lines = done.out.splitlines()
    assert any(line.startswith("ok      verifier: accepts") for line in lines)
    assert "        <|im_start|>assistant" in lines and "\x1b" not in done.out


def test_a_teacher(cli: Cli, small: list[str], model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def variant(name: str, change: Callable[[Any, Any], None]) -> Path:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
        change(model, tokenizer)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    def louder(model: Any, tokenizer: Any) -> None:
        torch.manual_seed(1)
        torch.nn.init.normal_(model.get_input_embeddings().weight, 0, 0.2)

    def shorter(model: Any, tokenizer: Any) -> None:
        tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "bot")

    code, found = findings(cli, "opd_full", *small, f"signal.0.teacher={variant('louder', louder)}")
    teacher = found[f"teacher {tmp_path / 'louder'}"]
    assert code == 0 and teacher["status"] == "ok", teacher
    assert len(teacher["facts"]["kl_policy_teacher"]) == 8 and min(teacher["facts"]["kl_policy_teacher"]) > 0.01
    code, found = findings(cli, "opd_full", *small, f"signal.0.teacher={variant('shorter', shorter)}")
    teacher = found[f"teacher {tmp_path / 'shorter'}"]
    assert teacher["status"] == "warning" and "hardly differs" in teacher["detail"]
    assert "renders the prompt otherwise" in teacher["detail"]
    assert "bot" in teacher["facts"]["prompt_in_its_own_format"]


def test_a_teacher_with_another_vocabulary(cli: Cli, small: list[str], model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    from transformers import AutoModelForCausalLM

    from statewise.tiny.tokenizer import train_tokenizer

    AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(tmp_path)
    train_tokenizer(["other words make other tokens"] * 30, 300, 256).save_pretrained(tmp_path)
    code, found = findings(cli, "opd_full", *small, f"signal.0.teacher={tmp_path}")
    assert code == 1 and "has another vocabulary" in found[f"teacher {tmp_path}"]["detail"]
    assert found["memory"]["status"] == "ok", "the other checks go on"


def test_data_without_ends(cli: Cli, small: list[str]) -> None:
    code, found = findings(cli, "dpo", *small, "source.max_length=60", "source.too_long=truncate")
    assert code == 1 and "won't learn to stop" in found["data"]["detail"]
    recipe = Recipe.load("dpo", small)
    lengths = [r.num_tokens for r in recipe.source.sample(0, 32, World(load_tokenizer(recipe.model), seed=0))]
    half = f"source.max_length={sorted(lengths)[16]}"
    code, found = findings(cli, "dpo", *small, half, "source.too_long=truncate")
    share = found["data"]["facts"]
    assert code == 0 and found["data"]["status"] == "warning" and 0 < share["with_end_token"] < share["samples"]


def test_a_verifier_that_fails_its_test(cli: Cli, small: list[str], tmp_path: Path) -> None:
    (tmp_path / "kind.py").write_text("def always(text, example):\n    return 1.0\n")
    verifier = f'{{ kind = "function", call = "{tmp_path / "kind.py"}:always" }}'
    code, found = findings(cli, "grpo", *small, f"signal.0.verifier={verifier}")
    assert code == 1 and found["verifier"]["status"] == "failed", found["verifier"]
    assert "a policy would learn to write that" in found["verifier"]["detail"]


def test_what_does_not_fit(cli: Cli, small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "free_bytes", lambda: 2**20)
    done = cli("doctor", "dpo", *small)
    assert done.code == 1 and "lower batch.micro_tokens" in done.out
    assert "1 of 4 checks failed: memory" in done.err


def test_an_embedding_too_few(cli: Cli, small: list[str], model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path)
    code, found = findings(cli, "dpo", f"model.path={tmp_path}", "source.count=40")
    assert code == 1 and "has no embedding (100 rows)" in found["tokenizer"]["detail"]


def test_free_memory_is_that_of_the_machine() -> None:
    assert 2**26 < plan.free_bytes() < 2**50


def test_bad_input(cli: Cli) -> None:
    assert cli("doctor", "no_such_recipe").code == 2
    assert "no recipe is named" in cli("doctor", "optim.lr=1").err


def test_a_teacher_at_an_endpoint(cli: Cli, small: list[str], model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    from tests.models.server import Server, serving
    from tests.training.test_teachers import small_teacher

    from statewise.training.remote import PROFILED

    path = small_teacher(model_dir, tmp_path / "teacher")
    with serving(Server(path, max_logprobs=PROFILED)) as server:
        remote = f"signal.0.teacher={{ endpoint = '{server.url}', retries = 0 }}"
        loss = "objective.0.loss={kind='kl_student_teacher', top_k=16}"
        code, found = findings(cli, "opd_topk", *small, remote, loss)
        teacher = found[f"teacher {server.url}"]
        assert code == 0 and teacher["status"] == "ok" and teacher["detail"] == "same tokens", teacher
        able = teacher["facts"]["endpoint"]
        assert able.pop("seconds") > 0
        assert able == {
            "model": "teacher",
            "context": 256,
            "tokens_checked_by": "prompt_token_ids",
            "prompt_logprobs_by": "prompt_logprobs",
            "top_k": 16,
        }
        _, here = findings(cli, "opd_topk", *small, f"signal.0.teacher={path}", loss)
        exact = here[f"teacher {path}"]["facts"]["kl_policy_teacher"]
        profile = teacher["facts"]["kl_policy_teacher"]
        assert len(profile) == 8 and all(0 < a <= b + 1e-6 for a, b in zip(profile, exact, strict=True))
        shown = cli("doctor", "opd_topk", *small, remote, loss).out
        assert "        endpoint: model teacher | context 256 | tokens checked by prompt_token_ids" in shown
        code, found = findings(cli, "opd_topk", *small, remote, loss.replace("16", "40"))
        assert code == 1 and "--max-logprobs 40" in found[f"teacher {server.url}"]["detail"]
        assert found["memory"]["status"] == "ok"
    code, found = findings(cli, "opd_topk", *small, remote, loss)
    assert code == 1 and "connection refused" in found[f"teacher {server.url}"]["detail"]


def test_a_server_that_samples(cli: Cli, small: list[str], model_dir: Path) -> None:  # noqa: F811
    from tests.models.server import Server, serving

    code, found = findings(cli, "grpo", *small, "model.sampler=vllm")
    assert code == 1 and "pip install 'statewise[vllm]'" in found["sampler"]["detail"]
    with serving(Server(model_dir)) as server:
        own = [*small, f"model.sampler={{ engine = 'vllm', url = '{server.url}' }}"]
        code, found = findings(cli, "grpo", *own)
        assert code == 0 and found["sampler"]["facts"]["logprobs_of"] == "temperature 1"
        code, found = findings(cli, "grpo", *own, "source.temperature=0.7")
        assert code == 1 and "processed_logprobs" in found["sampler"]["detail"]
        server.processed = True
        code, found = findings(cli, "grpo", *own, "source.temperature=0.7")
        assert code == 0 and found["sampler"]["facts"]["logprobs_of"] == "the law"


def test_one_fault_is_told_once(cli: Cli, small: list[str], tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1 + 1?", "completion": "2"}\n')
    code, found = findings(cli, "tiny_sft", small[0], f"source.data={data}", 'source.columns={ prompt = "question" }')
    assert code == 1 and "source.columns={} takes columns by their own names" in found["data"]["detail"]
    assert found["memory"]["detail"] == "can't be told before data is mended"
