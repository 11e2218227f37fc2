"""Plain text under a tokenizer with a chat template: said once, and only where nobody chose."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.training.conftest import model_dir  # noqa: F401 - a fixture

from statewise import train
from statewise.models.load import load_tokenizer
from statewise.recipe import Recipe
from statewise.sources.plain import untemplated
from statewise.types import World

TEXT = {"prompt": "2 + 2 = ", "completion": "4"}
MESSAGES = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
IDS = {**TEXT, "input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}


def recipe_of(model: Path, file: Path, row: dict[str, Any], **source: Any) -> Recipe:
    file.write_text(json.dumps(row) + "\n")
    kind = source.pop("kind", "dataset")
    on_policy = kind == "policy"
    plain = {
        "model": {"path": str(model)},
        "source": {"kind": kind, "data": str(file), **source},
        "signal": [{"kind": "reward", "verifier": "answer"}] if on_policy else ["gold"],
        "objective": ["clip" if on_policy else "nll"],
        "batch": {"rollouts": 8},
        "budget": {"max_steps": 1},
    }
    return Recipe.from_plain(plain)


@pytest.mark.parametrize(
    ("row", "source", "told"),
    [
        (TEXT, {}, True),
        ({**TEXT, "answer": "4"}, {"kind": "policy"}, True),
        (TEXT, {"chat": True}, False),
        (TEXT, {"chat": False}, False),
        (MESSAGES, {}, False),
        ({"text": "Two and two are four."}, {}, False),
        (IDS, {}, False),
    ],
)
def test_only_where_nobody_chose(
    model_dir: Path,  # noqa: F811
    tmp_path: Path,
    row: dict[str, Any],
    source: dict[str, Any],
    told: bool,
) -> None:
    recipe = recipe_of(model_dir, tmp_path / "rows.jsonl", row, **source)
    world = World(tokenizer=load_tokenizer(recipe.model), seed=0, base_dir=Path())
    said = untemplated(recipe.source, world)
    assert (said is not None) == told
    assert said is None or "source.chat = true" in said
    world.tokenizer.chat_template = None
    assert untemplated(recipe.source, world) is None


def test_a_run_keeps_it_and_says_it_once(model_dir: Path, tmp_path: Path, capsys: Any) -> None:  # noqa: F811
    from statewise.training.plan import plan

    recipe = recipe_of(model_dir, tmp_path / "rows.jsonl", TEXT)
    run = train(recipe, tmp_path / "run")
    assert capsys.readouterr().err.count("without the chat template") == 1
    assert len(run.info["warnings"]) == 1
    train(recipe, tmp_path / "run", resume=True)
    told = capsys.readouterr().err
    assert "without the chat template" not in told and "nothing is left of the budget" in told
    assert "warning:   prompts of" in "\n".join(plan(recipe).words())
