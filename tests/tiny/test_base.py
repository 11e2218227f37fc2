"""The shipped base: size, layout, and scores that agree with build.json."""

import json
from typing import Any

import pytest

from statewise.tiny import model_path, score, tasks

MAX_BYTES = 4_000_000
SCORED = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return json.loads((model_path() / "build.json").read_text())


@pytest.fixture(scope="module")
def base() -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(model_path())


def test_the_files_are_there_and_small() -> None:
    files = {file.name: file.stat().st_size for file in model_path().iterdir()}
    assert files.keys() >= SCORED | {"chat_template.jinja", "build.json"}
    assert sum(files.values()) < MAX_BYTES


def test_it_is_a_bf16_qwen3_of_under_a_million_parameters_that_generates_with_a_cache(base: Any, report: Any) -> None:
    import torch
    from safetensors import safe_open

    model, tokenizer = base
    with safe_open(model_path() / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert model.config.model_type == "qwen3" and model.config.tie_word_embeddings
    assert model.num_parameters() == report["parameters"] < 1_000_000
    assert json.loads((model_path() / "generation_config.json").read_text())["use_cache"] is True
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_build_json_is_the_shipped_recipe(report: dict[str, Any]) -> None:
    from dataclasses import asdict

    from statewise.tiny.build import BuildRecipe

    assert report["seed"] == 0
    assert report["recipe"] == json.loads(json.dumps(asdict(BuildRecipe())))


def test_the_base_is_half_way_so_that_there_is_room_both_ways(report: dict[str, Any]) -> None:
    scores = report["scores"]
    assert 0.3 < scores["math"] < 0.6
    assert 0.8 < scores["facts"] < 1.0
    assert 0.4 < scores["beliefs"] < scores["facts"]
    assert scores["math_pass_at_8"] > scores["math"] + 0.1


def test_scores_on_a_sample_agree_with_build_json(base: Any, report: dict[str, Any]) -> None:
    """Exact rows differ between machines by rounding only; four standard errors of the sample."""
    model, tokenizer = base
    scores, size = report["scores"], 96
    measured = {
        "math": score.exact_match(model, tokenizer, tasks.math_problems("test", size)),
        "facts": score.multiple_choice(model, tokenizer, tasks.facts("test", size)),
        "beliefs": score.multiple_choice(model, tokenizer, tasks.beliefs("test", size)),
    }
    for name, right in measured.items():
        expected = scores[name]
        error = (expected * (1 - expected) / size) ** 0.5
        assert sum(right) / size == pytest.approx(expected, abs=4 * error), name
    nats = score.text_cross_entropy(model, tokenizer, tasks.texts("test", 60))
    assert nats == pytest.approx(scores["text_nats"], abs=0.03)
